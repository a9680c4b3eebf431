"""Where a rank other than the main one continues its log after a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.places import ATTEMPT, last_in_common, place_after

Written = tuple[str, int, str]  # engine, iteration, event


def written(folder: Path, events: list[Written]) -> EventLog:
    writer = LogWriter(folder)
    for number, (engine, iteration, event) in enumerate(events):
        writer.add(LoggedEvent(ord=number, engine=engine, event=event, iteration=iteration, seq=number))
    writer.close()
    return EventLog(folder)


EPOCH_ENDS_AT_10 = [
    *[("trainer", 9, name) for name in ("get_batch_started", "get_batch_completed")],
    *[("trainer", 10, name) for name in ("iteration_started", "iteration_completed", "metrics_logged")],
    *[("evaluator", 0, name) for name in ("started", "get_batch_started", "completed")],
    *[("trainer", 10, name) for name in ("validation_completed", "epoch_completed")],
    *[("trainer", 10, name) for name in ("epoch_started", "get_batch_started", "get_batch_completed")],
    ("trainer", 11, "iteration_started"),
]
OF_ITERATIONS = ("iteration_started", "iteration_completed")


@pytest.mark.parametrize("left_out", [(), OF_ITERATIONS], ids=["each iteration", "each third"])
@pytest.mark.parametrize(("in_epoch", "last"), [(True, "validation_completed"), (False, "epoch_completed")])
def test_it_continues_before_what_follows_the_iteration_also_without_the_iterations_own_events(
    left_out: tuple[str, ...], in_epoch: bool, last: str, tmp_path: Path
):
    events = [each for each in EPOCH_ENDS_AT_10 if each[2] not in left_out]
    expected = events.index(("trainer", 10, last))
    assert place_after(written(tmp_path, events), "trainer", 10, in_epoch) == (expected, expected + 1)


@pytest.mark.parametrize("left_out", [(), OF_ITERATIONS], ids=["each iteration", "each third"])
def test_what_a_rank_was_not_there_for_is_not_looked_for(left_out: tuple[str, ...], tmp_path: Path):
    first = [("trainer", iteration, name) for iteration in (6, 7) for name in OF_ITERATIONS]
    back = [("trainer", 21, name) for name in ("checkpoint_loaded", "started", "get_batch_started")]
    events = [each for each in [*first, ("trainer", 7, "metrics_logged"), *back] if each[2] not in left_out]
    place = events.index(("trainer", 7, "metrics_logged"))
    assert place_after(written(tmp_path, events), "trainer", 21, in_epoch=True) == (place, place + 1)


@pytest.mark.parametrize(
    ("seen", "starts", "last"),
    [
        (["a"], [(0, "a")], 21),
        (["a"], [(0, "a"), (7, "b")], 7),
        (["a", "c"], [(0, "a"), (7, "b")], 7),  # c and b both began at iteration 7
        (["a"], [(0, "a"), (14, "b"), (7, "c")], 7),
        (["a", "c"], [(0, "a"), (7, "b"), (14, "c")], 21),  # c has superseded what b computed again
        (["a", "c"], [(0, "a"), (7, "b"), (14, "c"), (18, "d")], 18),
        (["x"], [(0, "a"), (7, "b")], 0),  # the log of another run
        ([], [], 21),
    ],
)
def test_a_log_belongs_to_the_run_up_to_the_first_start_without_its_rank_since_the_last_one_with_it(
    seen: list[str], starts: list[tuple[int, str]], last: int, tmp_path: Path
):
    writer = LogWriter(tmp_path)
    for number, attempt in enumerate(seen):
        observed = {"max_epochs": 4, ATTEMPT: attempt}
        writer.add(LoggedEvent(engine="trainer", event="started", seq=number, observed=observed))
    writer.add(LoggedEvent(engine="evaluator", event="started", seq=len(seen)))
    writer.close()
    assert last_in_common(EventLog(tmp_path), starts, 21) == last
