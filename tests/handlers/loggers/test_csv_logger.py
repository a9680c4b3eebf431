"""The table of a CSVLogger: its rows, which may grow, and its columns."""

import errno
import math
import os

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.handlers import CSVLogger
from tests.support.engines import (
    UpdatingEngine,
    log_each_iteration,
    make_engine,
    policy_updated,
    rolled_out,
    validate_each_epoch,
    validated,
)
from tests.support.metric_files import at, loaded, rows


def test_a_row_for_each_log_point_and_validation_and_a_column_for_each_metric(tmp_path):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1 / 3 / i, "learning_rate": 0.5})
    validate_each_epoch(engine, [{"val/loss": 0.25}])
    CSVLogger(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert rows(tmp_path) == [
        ["iteration", "epoch", "train/loss", "learning_rate", "val/loss"],
        ["1", "1", repr(1 / 3), "0.5", ""],
        ["2", "1", repr(1 / 3 / 2), "0.5", ""],
        ["2", "1", "", "", "0.25"],
    ]


def test_each_row_is_there_before_the_run_continues(tmp_path):
    engine, seen = make_engine(), []
    log_each_iteration(engine, lambda i: {"train/loss": float(i)})
    CSVLogger(tmp_path).attach(engine)
    log_each_iteration(engine, lambda i: seen.append(len(rows(tmp_path))) or {})
    engine.run([0, 1, 2], max_epochs=1)
    assert seen == [2, 3, 4]  # values logged later in an iteration go to its row


def test_a_new_metric_widens_the_table_and_leaves_no_other_file(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    at(engine, 1, 2, {"b, with comma": 2.0})
    at(engine, 2, 3, {"a": 3.0})
    assert rows(tmp_path) == [
        ["iteration", "epoch", "a", "b, with comma"],
        ["1", "1", "1.0", ""],
        ["2", "1", "", "2.0"],
        ["3", "2", "3.0", ""],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_rollout_is_in_the_row_of_its_iteration(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"train/loss": 2.0})
    policy_updated(engine, {"policy/kl": 0.125})
    rolled_out(engine, {"rollout/return": 4.0})
    rolled_out(engine, {"rollout/return": 5.0})
    assert rows(tmp_path) == [
        ["iteration", "epoch", "train/loss", "policy/kl", "rollout/return"],
        ["1", "1", "2.0", "0.125", "4.0"],
        ["1", "1", "", "", "5.0"],
    ]


def test_non_finite_numbers_are_written_as_such(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": math.nan, "b": math.inf})
    assert rows(tmp_path)[1] == ["1", "1", "nan", "inf"]


def test_a_table_that_is_there_is_continued_with_its_own_columns(tmp_path):
    for iteration, metrics in ((1, {"a": 1.0, "b": 2.0}), (2, {"b": 4.0, "c": 5.0})):
        engine = make_engine()
        CSVLogger(tmp_path).attach(engine)
        at(engine, 1, iteration, metrics)
    assert rows(tmp_path) == [
        ["iteration", "epoch", "a", "b", "c"],
        ["1", "1", "1.0", "2.0", ""],
        ["2", "1", "", "4.0", "5.0"],
    ]


def test_its_own_cadence_reads_the_output_once_an_iteration(tmp_path):
    engine = UpdatingEngine()
    CSVLogger(tmp_path, every=Every(iterations=2, epochs=1)).attach(engine)
    engine.run([0] * 4, max_epochs=1)
    assert rows(tmp_path) == [
        ["iteration", "epoch", "train/loss", "learning_rate"],
        ["2", "1", "0.0", "1.0"],
        ["4", "1", "0.0", "1.0"],
    ]


def test_a_resumed_run_removes_the_rows_after_its_checkpoint(tmp_path):
    engine = make_engine()
    logger = CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"train/loss": 1.0})
    at(engine, 1, 2, {"train/loss": 2.0})
    checkpoint = logger.state_dict()
    at(engine, 1, 2, {"val/loss": 9.0})  # after the checkpoint, in the same iteration: the row grows
    at(engine, 1, 3, {"train/loss": 3.0})
    again = CSVLogger(tmp_path)
    engine = make_engine()
    again.attach(engine)
    again.load_state_dict(checkpoint)
    assert len(rows(tmp_path)) == 4  # a checkpoint that is refused costs nothing
    engine.state.iteration = 2
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000002-checkpoint", iteration=2))
    assert rows(tmp_path) == [
        ["iteration", "epoch", "train/loss", "val/loss"],
        ["1", "1", "1.0", ""],
        ["2", "1", "2.0", ""],
    ]
    assert again.state_dict() == checkpoint
    at(engine, 1, 2, {"val/loss": 8.0})  # logged again, and the row grows again
    assert rows(tmp_path)[2:] == [["2", "1", "2.0", "8.0"]]


def test_what_a_clock_has_measured_is_in_no_checkpoint(tmp_path):
    states = []
    for rate in (10.0, 11.0):
        engine = make_engine()
        logger = CSVLogger(tmp_path / str(rate)).attach(engine)
        at(engine, 1, 1, {"train/loss": 1.0, "samples_per_second": rate})
        states.append(logger.state_dict())
    assert states[0] == states[1]


@pytest.mark.parametrize("again", [{}, {"tokens_per_second": 11.0}])
def test_a_row_that_a_resume_logs_again_with_another_throughput_or_none_is_one_row(tmp_path, again):
    engine, point = make_engine(), {"train/loss": 1.0, "learning_rate": 0.5}
    logger = CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"train/loss": 1.0})
    half = logger.state_dict()
    at(engine, 1, 1, {**point, "tokens_per_second": 10.0})
    whole = logger.state_dict()
    for saved in (half, whole):
        engine = make_engine()
        resumed = CSVLogger(tmp_path).attach(engine)
        loaded(resumed, engine, 1, saved)
        at(engine, 1, 1, {**point, **again})
        assert resumed.state_dict() == whole
        assert rows(tmp_path)[1:] == [["1", "1", "1.0", "0.5", "10.0"]]
    at(engine, 1, 2, {"train/loss": 1.0, "tokens_per_second": 12.0})
    assert rows(tmp_path)[2:] == [["2", "1", "1.0", "", "12.0"]]


def test_a_checkpoint_of_an_older_version_counts_only_rows(tmp_path):
    engine = make_engine()
    logger = CSVLogger(tmp_path).attach(engine)
    for iteration in (1, 2, 3):
        at(engine, 1, iteration, {"train/loss": 1.0})
    logger.load_state_dict({"rows": 2})
    engine.state.iteration = 2
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000002-checkpoint", iteration=2))
    assert [row[0] for row in rows(tmp_path)] == ["iteration", "1", "2"]


def test_one_iterations_events_share_a_row(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"train/loss": 1.0, "learning_rate": 0.5})
    at(engine, 1, 1, {"throughput": 10.0})
    at(engine, 1, 2, {"train/loss": 2.0})
    at(engine, 1, 2, {"throughput": 20.0, "train/loss": 2.0})
    validated(engine, {"val/loss": 3.0})
    at(engine, 1, 2, {"memory": 7.0})  # after a validation, which has its own row
    assert rows(tmp_path) == [
        ["iteration", "epoch", "train/loss", "learning_rate", "throughput", "val/loss", "memory"],
        ["1", "1", "1.0", "0.5", "10.0", "", ""],
        ["2", "1", "2.0", "", "20.0", "", ""],
        ["2", "1", "", "", "", "3.0", ""],
        ["2", "1", "", "", "", "", "7.0"],
    ]


def test_both_values_of_one_iteration_are_kept(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    at(engine, 1, 1, {"a": 2.0})
    assert rows(tmp_path)[1:] == [["1", "1", "1.0"], ["1", "1", "2.0"]]


def test_engines_of_one_bus_share_no_row(tmp_path):
    one = make_engine()
    other = Engine(lambda engine, batch: 0.0, name="other", bus=one.bus)
    CSVLogger(tmp_path).attach(one.bus)
    at(one, 1, 1, {"a": 1.0})
    at(other, 1, 1, {"b": 2.0})
    at(other, 1, 1, {"a": 3.0})
    assert rows(tmp_path) == [
        ["iteration", "epoch", "trainer/a", "other/b", "other/a"],
        ["1", "1", "1.0", "", ""],
        ["1", "1", "", "2.0", "3.0"],
    ]


def test_a_row_that_has_been_changed_by_others_is_not_overwritten(tmp_path):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().replace("1.0,1.0", "1.5,1.5"), newline="")
    at(engine, 1, 1, {"a": 1.0})
    assert rows(tmp_path)[1:] == [["1", "1", "1.5", "1.5"], ["1", "1", "1.0", "1.0"]]


def test_a_full_disk_leaves_the_row_as_it_was_and_the_next_writing_makes_it_whole(tmp_path, monkeypatch):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    at(engine, 1, 2, {"a": 2.0})
    before, write = (tmp_path / "metrics.csv").read_bytes(), os.write

    def write_a_part(descriptor, content):
        if len(content) > 9:
            write(descriptor, content[:3])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_a_part)
    with capture_logs() as logs:
        at(engine, 1, 2, {"b": 0.123456789})
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert len(logs) == 1
    monkeypatch.undo()
    validated(engine, {"a": 3.0})
    assert [row[2:] for row in rows(tmp_path)[1:]] == [["1.0", "1.0"], ["2.0", "0.123456789"], ["3.0", ""]]


def test_a_checkpoint_whose_last_row_is_of_another_iteration_changes_nothing(tmp_path):
    engine = make_engine()
    logger = CSVLogger(tmp_path).attach(engine)
    for iteration in (1, 2, 3):
        at(engine, 1, iteration, {"a": 1.0, "b": 2.0})
    before = rows(tmp_path)
    loaded(logger, engine, 2, {"rows": 2, "growing": ["trainer", 1, ["a", "iteration", "epoch"]]})
    assert rows(tmp_path) == before
    loaded(logger, engine, 2, {"rows": 2, "growing": ["trainer", 2, ["a", "iteration", "epoch"]]})
    assert rows(tmp_path)[1:] == [["1", "1", "1.0", "2.0"], ["2", "1", "1.0", ""]]


# ------------------------------------------------------------------------------------------------------- rows that wait


def test_a_pending_row_receives_later_values(tmp_path, full):
    engine = make_engine()
    CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    full(True)
    with capture_logs():
        at(engine, 1, 2, {"a": 2.0})
        at(engine, 1, 2, {"b": 2.5})
    full(False)
    at(engine, 1, 3, {"a": 3.0})
    assert rows(tmp_path)[1:] == [["1", "1", "1.0", "1.0"], ["2", "1", "2.0", "2.5"], ["3", "1", "3.0", ""]]


def test_a_checkpoint_counts_the_rows_that_wait(tmp_path, full):
    engine = make_engine()
    logger = CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    at(engine, 1, 2, {"a": 2.0})
    full(True)
    with capture_logs():
        at(engine, 1, 2, {"b": 2.5})  # takes the place of the one that is there
        at(engine, 1, 3, {"a": 3.0})
        checkpoint = logger.state_dict()
        at(engine, 1, 4, {"a": 4.0})
    assert checkpoint == {"rows": 3, "waiting": 2, "growing": ["trainer", 3, ["a", "iteration", "epoch"]]}
    full(False)
    at(engine, 1, 5, {"a": 5.0})
    assert len(rows(tmp_path)) == 6
    loaded(logger, engine, 3, checkpoint)
    assert rows(tmp_path)[1:] == [["1", "1", "1.0", "1.0"], ["2", "1", "2.0", "2.5"], ["3", "1", "3.0", ""]]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_rows_that_wait_after_a_checkpoint_are_not_written(tmp_path, full, kept):
    engine, states = make_engine(), {}
    logger = CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    states[1] = logger.state_dict()
    at(engine, 1, 2, {"a": 2.0})
    full(True)
    with capture_logs():
        at(engine, 1, 2, {"b": 2.5})
        states[2] = logger.state_dict()
        at(engine, 1, 3, {"a": 3.0})
        states[3] = logger.state_dict()
        at(engine, 1, 3, {"b": 3.5})
        at(engine, 1, 4, {"a": 4.0})
        loaded(logger, engine, kept, states[kept])
        assert logger.state_dict() == states[kept]
    full(False)
    at(engine, 1, kept + 1, {"a": 9.0})
    expected = [["1", "1", "1.0", "1.0"], ["2", "1", "2.0", "2.5"], ["3", "1", "3.0", ""]][:kept]
    assert rows(tmp_path)[1:] == [*expected, [str(kept + 1), "1", "9.0", ""]]


def test_while_a_disk_stays_full_the_oldest_rows_are_dropped_to_bound_memory(tmp_path, full, monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.loggers.text_file._AT_MOST", 250)
    engine = make_engine()
    logger = CSVLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0, "b": 1.0})
    full(True)
    with capture_logs() as logs:
        at(engine, 1, 1, {"b": 1.0})  # nothing new, and the first that waits: it would take the row's place
        for iteration in range(2, 302):
            at(engine, 1, iteration, {"a": float(iteration)})
    assert sum("the oldest are lost" in line["event"] for line in logs) == 1
    full(False)
    at(engine, 1, 302, {"a": 302.0})
    assert [int(row[0]) for row in rows(tmp_path)[1:]] == [1, *range(53, 303)]
    assert logger.state_dict()["rows"] == 251
