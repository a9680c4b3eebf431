"""What holds for every logger that keeps a file of lines in the run folder."""

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.handlers import CSVLogger, JSONLinesLogger
from tests.support.engines import log_each_iteration, make_engine, validated
from tests.support.metric_files import at, lines, loaded, rows


def of_table(folder):
    columns, *found = rows(folder)
    return [(int(row[0]), float(row[columns.index("a")])) for row in found]


def of_lines(folder):
    return [(line["iteration"], line["a"]) for line in lines(folder)]


# each logger, its file, the pairs (iteration, value of "a") in it, and the key of their number in a checkpoint
LOGGERS = [(CSVLogger, "metrics.csv", of_table, "rows"), (JSONLinesLogger, "metrics.jsonl", of_lines, "lines")]
pytestmark = pytest.mark.parametrize(("make", "name", "found", "unit"), LOGGERS, ids=["csv", "json lines"])


def test_constructing_and_attaching_write_no_file(make, name, found, unit, tmp_path):
    make(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    make(tmp_path / "run").attach(make_engine())
    assert list((tmp_path / "run").iterdir()) == []


def test_an_invalid_cadence_is_refused(make, name, found, unit, tmp_path):
    with pytest.raises(TypeError, match=rf"{make.__name__}\(every=10\): needs an Every"):
        make(tmp_path, every=10)


def test_its_own_cadence_reads_the_output(make, name, found, unit, tmp_path):
    engine = make_engine(lambda i: {"a": float(i)})
    logger = make(tmp_path, Every(iterations=2)).attach(engine)
    engine.run([0] * 4, max_epochs=1)
    content = (tmp_path / name).read_text()
    assert "train/a" in content
    (tmp_path / name).write_text(content.replace("train/a", "a"))
    assert found(tmp_path) == [(2, 2.0), (4, 4.0)]
    assert logger.state_dict()[unit] == 2


@pytest.mark.parametrize(
    "content",
    [b"step,loss\n1,2\n", b"\xff\xfe\x00\n", b'{"step": 1}\n', b"[1]\n", b"iteration,loss\n"],
    ids=["table", "bytes", "object", "list", "header"],
)
def test_another_file_is_refused_and_left_as_it_is(make, name, found, unit, tmp_path, content):
    (tmp_path / name).write_bytes(content)
    said = rf"{make.__name__}\(folder=.*{name} there was not written by this logger: its first .*move it or choose"
    with pytest.raises(RunFolderError, match=said):
        make(tmp_path).attach(make_engine())
    assert (tmp_path / name).read_bytes() == content


def test_a_line_that_a_killed_run_left_unfinished_is_dropped_and_reported(make, name, found, unit, tmp_path):
    engine = make_engine()
    make(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole + b'{"event": 2,1,1.2')
    engine = make_engine()
    make(tmp_path).attach(engine)
    assert (tmp_path / name).read_bytes() != whole, "another process may still be writing the line"
    with capture_logs() as logs:
        at(engine, 1, 2, {"a": 1.25})
    assert logs[0]["dropped"] == '{"event": 2,1,1.2'
    assert found(tmp_path) == [(1, 1.0), (2, 1.25)]


def test_a_file_that_cannot_be_written_ends_the_run_if_asked_to(make, name, found, unit, tmp_path):
    for on_error in ("raise", "warn"):
        engine = make_engine()
        log_each_iteration(engine, lambda i: {"a": 1.0})
        make(tmp_path / on_error, on_error=on_error).attach(engine)
        (tmp_path / on_error / name).mkdir()
        if on_error == "raise":
            with pytest.raises(OSError, match=name):
                engine.run([0, 1], max_epochs=1)
        else:
            with capture_logs() as logs:
                engine.run([0, 1], max_epochs=1)
            assert engine.state.iteration == 2
            assert len(logs) == 1


def test_a_line_that_could_not_be_written_is_written_with_the_next(make, name, found, unit, tmp_path):
    engine = make_engine()
    make(tmp_path).attach(engine)
    (tmp_path / name).mkdir()
    with capture_logs() as logs:
        at(engine, 1, 1, {"a": 1.0})
    assert len(logs) == 1
    (tmp_path / name).rmdir()
    at(engine, 1, 2, {"a": 2.0})
    assert found(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_two_loggers_of_one_file_are_refused_only_on_one_bus(make, name, found, unit, tmp_path):
    engine = make_engine()
    first = make(tmp_path).attach(engine)
    said = rf"{make.__name__}.attach\(\): another {make.__name__} of this bus writes .*{name}"
    for target in (engine, engine.bus):
        with pytest.raises(RunFolderError, match=said):
            make(tmp_path / "." / "").attach(target)
    make(tmp_path).attach(make_engine())  # a new trainer, while a notebook still holds the old one
    first.detach()
    make(tmp_path).attach(engine)


def test_a_resumed_run_removes_the_lines_after_its_checkpoint(make, name, found, unit, tmp_path):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    at(engine, 1, 2, {"a": 2.0})
    checkpoint = logger.state_dict()
    validated(engine, {"a": 9.0})
    at(engine, 1, 3, {"a": 3.0})
    engine = make_engine()
    again = make(tmp_path).attach(engine)
    again.load_state_dict(checkpoint)
    assert len(found(tmp_path)) == 4  # a checkpoint that is refused costs nothing
    loaded(again, engine, 2, checkpoint)
    assert found(tmp_path) == [(1, 1.0), (2, 2.0)]
    at(engine, 1, 3, {"a": 3.5})
    assert found(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.5)]


def test_a_checkpoint_of_another_run_removes_no_lines(make, name, found, unit, tmp_path):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    for iteration in (1, 2, 3):
        at(engine, 1, iteration, {"a": 1.0})
    loaded(logger, engine, 1000, {unit: 1})
    loaded(logger, engine, 1, {unit: 4})
    assert len(found(tmp_path)) == 3


def resumed(make, folder, iteration, state, run_folder=None):
    """What a new process logs when it resumes from a checkpoint of this iteration."""
    engine = make_engine()
    logger = make(folder).attach(engine)
    with capture_logs() as logs:
        loaded(logger, engine, iteration, state, run_folder)
    at(engine, 1, iteration + 1, {"a": 9.0})
    assert logger.state_dict()[logger.unit] == len(logger.read_lines()), "the file continues from what is there"
    logger.detach()
    return [(line["log_level"], line["event"], line["missing"]) for line in logs]


@pytest.mark.parametrize("there", [0, 1, 4])
def test_lines_that_are_missing_when_a_run_resumes_are_counted_in_a_warning(make, name, found, unit, tmp_path, there):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    for iteration in range(1, 6):
        at(engine, 1, iteration, {"a": 1.0})
        if iteration == there:
            short = (tmp_path / name).read_bytes()
    state = logger.state_dict()
    if there:
        (tmp_path / name).write_bytes(short)
    else:
        (tmp_path / name).unlink()
    ((level, text, missing),) = resumed(make, tmp_path, 5, state)
    assert (level, missing) == ("warning", 5 - there)
    assert text.startswith(f"{name} has fewer {unit} than when the checkpoint was saved; the run continues it")
    assert [iteration for iteration, _ in found(tmp_path)] == [*range(1, there + 1), 6]


def test_a_file_of_another_run_is_reported_when_a_run_resumes_and_continued(make, name, found, unit, tmp_path):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    at(engine, 1, 50, {"a": 1.0})
    state = logger.state_dict()
    (tmp_path / name).unlink()
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    for iteration in (10, 20):
        at(engine, 1, iteration, {"a": 1.0})
    logger.detach()
    ((level, text, missing),) = resumed(make, tmp_path, 50, state)
    assert (level, missing) == ("warning", 0)
    assert text.startswith(f"{name} has {unit} of another run, which do not fit the checkpoint; those of this run")
    assert [iteration for iteration, _ in found(tmp_path)] == [10, 20, 51]


def test_no_warning_of_missing_lines_where_a_run_resumes_in_another_folder(make, name, found, unit, tmp_path):
    engine = make_engine()
    logger = make(tmp_path / "one").attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    said = resumed(make, tmp_path / "two", 1, logger.state_dict(), tmp_path / "one")
    assert said == [("info", f"{name} begins here: the {unit} before the checkpoint are in another folder", 1)]


@pytest.mark.parametrize("waited", [1, 3])
def test_lines_that_waited_when_the_process_ended_are_not_reported_as_missing(
    make, name, found, unit, tmp_path, full, waited
):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    full(True)
    with capture_logs():
        for iteration in range(2, 2 + waited):
            at(engine, 1, iteration, {"a": 1.0})
    state = logger.state_dict()
    full(False)
    logger.detach()
    assert state[unit] == 1 + waited
    assert resumed(make, tmp_path, 1 + waited, state) == []
    (tmp_path / name).unlink()
    ((level, _, missing),) = resumed(make, tmp_path, 1 + waited, state)
    assert (level, missing) == ("warning", 1 + waited)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_no_file_that_is_as_its_run_left_it_is_reported_when_the_run_resumes(make, name, found, unit, tmp_path, after):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    for iteration in (1, 2, 3):
        at(engine, 1, iteration, {"a": 1.0})
    state = logger.state_dict()
    for iteration in range(4, 4 + after):
        at(engine, 1, iteration, {"a": 1.0})
    logger.detach()
    assert resumed(make, tmp_path, 3, state) == []


def test_a_restarted_run_removes_its_lines(make, name, found, unit, tmp_path, full):
    engine = make_engine()
    logger = make(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    full(True)
    with capture_logs():
        at(engine, 1, 2, {"a": 2.0})  # waits
    full(False)
    logger.begin_again()
    assert found(tmp_path) == []
    at(engine, 1, 1, {"a": 3.0})
    assert found(tmp_path) == [(1, 3.0)]


def test_while_a_disk_stays_full_the_oldest_lines_are_dropped_to_bound_memory(
    make, name, found, unit, tmp_path, full, monkeypatch
):
    monkeypatch.setattr("pulsetrain.handlers.loggers.text_file._AT_MOST", 250)
    engine = make_engine()
    make(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    full(True)
    with capture_logs() as logs:
        for iteration in range(2, 302):
            at(engine, 1, iteration, {"a": float(iteration)})
    assert sum("the oldest are lost" in line["event"] for line in logs) == 1
    full(False)
    at(engine, 1, 302, {"a": 302.0})
    assert [iteration for iteration, _ in found(tmp_path)] == [1, *range(53, 303)]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_lines_that_wait_after_a_checkpoint_are_not_written(make, name, found, unit, tmp_path, full, kept):
    engine, states = make_engine(), {}
    logger = make(tmp_path).attach(engine)
    for iteration in (1, 2, 3, 4):
        full(iteration > 2)
        with capture_logs():
            at(engine, 1, iteration, {"a": 1.0})
        states[iteration] = logger.state_dict()
    loaded(logger, engine, kept, states[kept])
    assert logger.state_dict() == states[kept]
    assert states[kept][unit] == kept
    full(False)
    at(engine, 1, kept + 1, {"a": 9.0})
    assert [iteration for iteration, _ in found(tmp_path)] == list(range(1, kept + 2))


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_file_that_is_removed_during_the_run_is_warned_of_and_begun_again(
    make, name, found, unit, tmp_path, at_the_end
):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    logger = make(tmp_path).attach(engine)
    removed = 4 if at_the_end else 2
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=removed), (tmp_path / name).unlink, phase=Phase.PERSIST)
    with capture_logs() as logs:
        engine.run([0] * 4, max_epochs=1)
    (warning,) = (each for each in logs if each["log_level"] == "warning")
    assert "has been removed during the run" in warning["event"]
    assert (warning["lost"], warning["path"]) == (removed, str(tmp_path / name))
    assert logger.state_dict()[unit] == 4 - removed
    if at_the_end:
        assert not (tmp_path / name).exists()
    else:
        assert found(tmp_path) == [(3, 3.0), (4, 4.0)]
