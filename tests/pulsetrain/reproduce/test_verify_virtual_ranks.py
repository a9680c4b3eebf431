"""A run with virtual ranks is verified by any number of processes that divides theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pulsetrain import verify
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.reproduce.processes import virtual_ranks_of
from tests.pulsetrain.reproduce.test_verify_ranks import rewrite
from tests.pulsetrain.training.test_virtual_ranks import chain
from tests.support.runs_of_virtual_ranks import run_on, virtual


def again(run: Path, **options: Any) -> Any:
    return verify(run, lambda folder: virtual(folder), **options)


@pytest.mark.parametrize(
    ("recorded", "repeated"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 4, marks=pytest.mark.slow)],
)
def test_another_number_of_processes_repeats_a_run(recorded: int, repeated: int, tmp_path: Path):
    run_on(recorded, lambda rank: virtual(tmp_path).train())
    found = run_on(repeated, lambda rank: again(tmp_path), 120)
    assert {str(each) for each in found} == {str(found[0])}
    assert found[0], str(found[0])
    assert found[0].checkpoints == tuple(range(1, 16))
    recorded_events = [each for each in EventLog(tmp_path, 0).read() if each.ord >= 0 and not each.open]
    left_out = [each for each in recorded_events if each.event == "batch_fingerprinted"]
    assert found[0].agreed == len(recorded_events) - len(left_out)
    trained_by = f"{recorded} process{'' if recorded == 1 else 'es'}"
    assert f"the run was trained by {trained_by}, and repeated by {repeated}" in str(found[0])


@pytest.mark.slow
def test_a_run_of_changing_numbers_is_repeated_as_one(tmp_path: Path):
    chain(tmp_path, [(2, 3), (1, 7), (2, None)])
    (found,) = run_on(1, lambda rank: again(tmp_path))
    assert found, str(found)
    assert (found.start, found.end) == (0, 15)
    assert "trained by 2 and then 1 and then 2 processes" in str(found)


def another_loss(event: LoggedEvent) -> LoggedEvent:
    if (event.event, event.iteration) != ("iteration_completed", 12):
        return event
    return replace(event, output={"loss": event.output["loss"] * (1 + 2**-50)})


def test_a_difference_in_the_last_bits_is_found_by_all(tmp_path: Path):
    run_on(2, lambda rank: virtual(tmp_path).train())
    rewrite(tmp_path, 0, another_loss)
    alone = run_on(1, lambda rank: again(tmp_path, from_iteration=9))
    two = run_on(2, lambda rank: again(tmp_path))  # as many as recorded it: each compares its own log
    assert [each.differs for each in (*alone, *two)] == [True] * 3
    assert list(alone[0].divergence.fields) == ["output.loss"]
    assert alone[0].divergence.a.iteration == 12
    assert len(alone[0].rows) == 4  # of the global batch
    (cause,) = alone[0].causes
    assert (cause.kind, cause.text[:47]) == ("topology", "number of processes: 2 when it was recorded, an")
    assert [each.kind for each in two[0].causes] == ["code"], "nothing has changed"


def test_a_changed_number_of_virtual_ranks_is_the_likeliest_cause(tmp_path: Path):
    virtual(tmp_path, max_epochs=1).train()
    found = verify(tmp_path, lambda folder: virtual(folder, count=2, max_epochs=1))
    assert found.differs
    assert found.causes[0].kind == "topology"
    assert "virtual: 4 -> 2" in found.causes[0].text
    assert found.causes[0].text.count("virtual") == 1
    assert "code" not in [each.kind for each in found.causes]


def test_a_number_that_does_not_divide_the_virtual_ranks_is_refused(tmp_path: Path):
    virtual(tmp_path, max_epochs=1).train()
    assert virtual_ranks_of(tmp_path) == 4

    def body(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            again(tmp_path)
        return str(refused.value)

    for said in run_on(3, body):
        assert "3 processes cannot share the run's 4 virtual ranks evenly; start 1: pulsetrain verify" in said
