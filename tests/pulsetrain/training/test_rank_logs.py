"""The event logs of several processes that train together: continued after a kill, compared, and read for a hang."""

from __future__ import annotations

import json
import os
import random
import signal
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.cli import main
from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.handlers import Checkpointer, EventRecorder, Fingerprints
from pulsetrain.handlers.recorder.event_recorder import LEAST_BYTES
from tests.support.cases import slow_but
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make

ITERATIONS = 40


def recorded(
    run: Path, *handlers: Any, saves: int = 7, options: Mapping[str, Any] | None = None, **config: Any
) -> Trainer:
    recorder = EventRecorder(run, **(options or {}))
    made = [recorder, Checkpointer(run, every=Every(iterations=saves)), Fingerprints(Every(iterations=5))]
    return make(
        linear(), DataLoader(pairs(40), 4), *made, *handlers, **{"max_epochs": 4, "clip_grad_norm": 1.0, **config}
    )


def finish(run: Path, world: int = 2, **options: Any) -> None:
    for each in in_processes(lambda rank: len(recorded(run, **options).train(resume="latest")), world):
        assert each.error == ""


def kill_at(iteration: int, run: Path, who: int, world: int = 2, **options: Any) -> None:
    """One rank kills all."""

    def kill() -> None:
        for file in sorted(run.glob("pid-*"), key=lambda file: file.read_text() == str(os.getpid())):
            os.kill(int(file.read_text()), signal.SIGKILL)  # itself last

    def body(rank: int) -> None:
        made = recorded(run, **options)
        (run / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=iteration))(kill)
        made.train(resume="latest")

    assert [each.status for each in in_processes(body, world)] == [-signal.SIGKILL] * world


def iterations_in(run: Path, rank: int) -> list[int]:
    return [event.iteration for event in EventLog(run, rank).read(engine="trainer", event="iteration_completed")]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_each_rank_continues_its_log_after_kills(who: int, tmp_path: Path):
    kill_at(18, tmp_path, who)
    kill_at(31, tmp_path, 1 - who)
    finish(tmp_path)
    for rank in (0, 1):
        log = EventLog(tmp_path, rank)
        assert log.verify() == []
        assert log.ended
        assert iterations_in(tmp_path, rank) == list(range(1, ITERATIONS + 1))
        assert len(list(log.read(event="epoch_completed"))) == 4
    found = diff_ranks(tmp_path)
    assert not found, str(found)
    assert found.agreed > 4 * ITERATIONS


@pytest.mark.parametrize(
    ("validates", "then"),
    slow_but(
        [(True, "")],
        [
            *((validates, "") for validates in (False, True)),
            *((True, then) for then in ("save", "validate", "validate, save")),
        ],
    ),
)
@pytest.mark.parametrize("bound", [6, 8])
def test_what_the_end_of_a_run_reports_stays_in_each_log_that_resumes_from_there(
    bound: int, validates: bool, then: str, tmp_path: Path
):
    """The last loss is logged, and the last validation made, while COMPLETED is delivered, before the last save."""

    def body(rank: int, bound: int, then: str) -> tuple[list[int], list[int]]:
        saver = Checkpointer(tmp_path, Every(iterations=50), at_end="save" not in then)
        handlers = [EventRecorder(tmp_path), saver]
        made = make(
            linear(), DataLoader(pairs(32), 4), *handlers, val_loader=DataLoader(pairs(12), 4) if validates else None,
            log_every_n_steps=4, max_iterations=bound, max_epochs=None,
        )  # fmt: skip
        made.train(resume="latest")
        if "validate" in then:
            made.validate()
        if "save" in then:
            made.save_checkpoint()
        log = EventLog(tmp_path, rank)
        return [
            [each.iteration for each in log.read(event=f"{name}")]
            for name in ("metrics_logged", "validation_completed")
        ]

    for until in (bound, bound, 12):
        ended = in_processes(lambda rank, until=until: body(rank, until, then if until == bound else ""))  # type: ignore[misc]
        assert [each.error for each in ended] == ["", ""]
        assert ended[0].value == ended[1].value
        found = diff_ranks(tmp_path)
        assert not found, str(found)
    logged, validated = ended[0].value
    assert logged == [4, *([6] if bound == 6 else []), 8, 12]
    assert not validates or {bound, 12} <= set(validated)


@pytest.mark.slow
def test_a_rank_that_was_not_there_for_a_while_has_a_log_with_a_gap(tmp_path: Path):
    kill_at(10, tmp_path, 0)  # after the checkpoint of iteration 7,
    kill_at(12, tmp_path, 0)  # from which it resumes twice: with this rank
    in_one = in_processes(lambda rank: stop_at(tmp_path, 21), 1)  # and without it
    assert in_one[0].error == ""
    kill_at(31, tmp_path, 0)
    finish(tmp_path)
    assert iterations_in(tmp_path, 0) == list(range(1, ITERATIONS + 1))
    assert iterations_in(tmp_path, 1) == [*range(1, 8), *range(22, ITERATIONS + 1)]
    assert not diff_ranks(tmp_path)


@pytest.mark.slow
def test_a_log_of_another_run_is_not_continued(tmp_path: Path):
    kill_at(10, tmp_path, 0)
    for file in (tmp_path / "events").glob("*rank1*"):
        file.unlink()
    write_log(tmp_path, 1, events=4 * ITERATIONS)
    finish(tmp_path)
    assert iterations_in(tmp_path, 1) == list(range(8, ITERATIONS + 1))
    assert not diff_ranks(tmp_path)


@pytest.mark.slow
def test_logs_of_each_third_iteration_are_continued_and_compared(tmp_path: Path):
    options: dict[str, Any] = {"saves": 5, "options": {"every": 3}}
    kill_at(13, tmp_path, 0, **options)  # iteration 10, the last one of an epoch, is not in the log
    finish(tmp_path, **options)
    for rank in (0, 1):
        log = EventLog(tmp_path, rank)
        assert log.verify() == []
        assert iterations_in(tmp_path, rank) == list(range(3, ITERATIONS + 1, 3))
        for name in ("epoch_started", "epoch_completed"):
            epochs = [event.epoch for event in log.read(engine="trainer", event=name) if event.ord >= 0]
            assert epochs == [1, 2, 3, 4], (rank, name)
    found = diff_ranks(tmp_path)
    assert not found, str(found)
    assert found.agreed > ITERATIONS


def stop_at(run: Path, iteration: int) -> None:
    made = recorded(run)
    made.on(Events.ITERATION_COMPLETED(once=iteration))(lambda engine: engine.terminate())
    made.train(resume="latest")


def change_a_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] *= 1 + 1e-9


@pytest.mark.parametrize("who", [0, 1])
def test_the_first_value_that_differs_between_ranks_is_named(who: int, tmp_path: Path, capsys: Any):
    def body(rank: int) -> None:
        made = recorded(tmp_path)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=12))(change_a_rate)
        made.train()

    assert {each.error for each in in_processes(body)} == {""}
    found = diff_ranks(tmp_path)
    assert found.event is not None
    assert (found.rank, found.event.event, found.event.iteration) == (1, "optimizer_step_completed", 13)
    assert list(found.fields or {}) == ["payload.learning_rates.0"]
    capsys.readouterr()
    assert main(["diff", str(tmp_path), "--ranks"]) == 1
    said = capsys.readouterr().out
    assert "rank 1 differs from rank 0 after" in said
    assert "optimizer_step_completed at epoch 2, iteration 13" in said
    assert main(["diff", str(tmp_path), "--ranks", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["rank"] == 1


def test_an_event_that_one_rank_alone_fires_is_named(tmp_path: Path):
    def body(rank: int) -> None:
        made = recorded(tmp_path)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=12))(lambda: made.state.metrics.update(extra=1.0))
        made.train()

    assert {each.error for each in in_processes(body)} == {""}
    found = diff_ranks(tmp_path)
    assert found.event is not None
    assert (found.event.event, found.event.epoch, list(found.fields or {})) == ("epoch_completed", 2, ["metrics.extra"])


def test_the_log_of_one_process_has_no_ranks_to_compare(tmp_path: Path, capsys: Any):
    recorded(tmp_path).train()
    with pytest.raises(RecordingError, match="has the log of rank 0 alone"):
        diff_ranks(tmp_path)
    assert main(["diff", str(tmp_path), str(tmp_path), "--ranks"]) == 2
    assert main(["diff", str(tmp_path)]) == 2
    assert "needs two run folders, or one with --ranks" in capsys.readouterr().err


NAMES = ("iteration_started", "gradients_ready", "optimizer_step_completed", "iteration_completed")


def write_log(
    folder: Path, rank: int, events: int, max_bytes: int | None = None, *, logs: bool = False, differs_at: int = 0
) -> None:
    """A log of iterations that log nothing, or metrics; of one iteration, the norm differs."""
    writer, names = LogWriter(folder / "events", rank, max_bytes), (*NAMES, *(["metrics_logged"] if logs else []))
    for at in range(events):
        iteration, name = at // len(names) + 1, names[at % len(names)]
        norm = random.Random(iteration).random() + (iteration == differs_at)  # which takes room
        payload = {"grad_norm": norm} if name == "gradients_ready" else None
        writer.add(LoggedEvent(at, "trainer", name, iteration=iteration, payload=payload, seq=writer.last_seq + 1))
    writer.close()


@pytest.mark.parametrize("lengths", [(10, 13), (13, 10)])
def test_logs_that_end_at_different_moments_agree(lengths: tuple[int, int], tmp_path: Path):
    for rank, events in enumerate(lengths):
        write_log(tmp_path, rank, events)
    found = diff_ranks(tmp_path)
    assert not found, str(found)
    assert found.agreed == 10


def test_of_many_logs_that_are_compared_a_few_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there, counts = weakref.WeakSet[EventLog](), list[int]()

    class Watched(EventLog):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            there.add(self)
            counts.append(len(there))

    for rank in range(20):
        write_log(tmp_path, rank, 8, differs_at=2 * (rank == 13))
    monkeypatch.setattr(import_module(diff_ranks.__module__), "EventLog", Watched)
    found = diff_ranks(tmp_path)
    assert (found.rank, found.agreed, list(found.fields or {})) == (13, 5, ["payload.grad_norm"])
    assert (len(counts), max(counts)) == (20, 3)


@pytest.mark.parametrize("thins", [0, 1])
def test_what_one_log_was_thinned_of_is_not_compared(thins: int, tmp_path: Path):
    events, differs_at = 20_000, 3900
    budgets = [LEAST_BYTES if rank == thins else None for rank in (0, 1)]
    for rank in (0, 1):
        write_log(tmp_path, rank, events, budgets[rank], logs=True)
        assert (len(EventLog(tmp_path, rank)) < events) == (rank == thins)
    found = diff_ranks(tmp_path)
    assert not found, str(found)
    for file in (tmp_path / "events").glob("*rank1*"):
        file.unlink()
    write_log(tmp_path, 1, events, budgets[1], logs=True, differs_at=differs_at)
    found = diff_ranks(tmp_path)
    assert found.event is not None
    assert (found.event.event, found.event.iteration) == ("gradients_ready", differs_at)


def test_what_the_run_itself_has_found_to_differ_counts(tmp_path: Path, capsys: Any):
    for rank in (0, 1):
        write_log(tmp_path, rank, 12)
    writer = LogWriter(tmp_path / "events", 0)
    found = {"field": "0.weight", "ranks": [1], "values": ["a", "b"], "at_iteration": 3}
    writer.add(LoggedEvent(ord=-1, engine="trainer", event="ranks_diverged", iteration=4, seq=99, t=1, payload=found))
    writer.end()
    assert main(["diff", str(tmp_path), "--ranks"]) == 1
    said = capsys.readouterr().out
    assert "ranks 0, 1 agree in 12 events" in said
    assert "found during the run: 0.weight of rank 1, found after iteration 3" in said
    assert main(["diff", str(tmp_path), "--ranks", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["reported"].startswith("0.weight of rank 1")


def test_folders_without_the_logs_of_several_ranks_are_named_as_they_are(tmp_path: Path, capsys: Any):
    (tmp_path / "events").mkdir()
    assert main(["diff", str(tmp_path), "--ranks"]) == 2
    assert "holds no event log" in capsys.readouterr().err
    write_log(tmp_path, 2, 12)
    assert main(["diff", str(tmp_path), "--ranks"]) == 2
    assert "no log of rank 0" in capsys.readouterr().err
    write_log(tmp_path, 0, 12)
    assert main(["diff", str(tmp_path), "--ranks"]) == 0
    assert "ranks 0, 2 agree in 12 events" in capsys.readouterr().out
    assert main(["diff", str(tmp_path), "--ranks", "--rtol", "0.1"]) == 2
    assert "leave --rtol out" in capsys.readouterr().err


def test_where_says_that_a_run_has_ended(tmp_path: Path, capsys: Any):
    finish(tmp_path)
    assert main(["where", str(tmp_path)]) == 0
    assert "every process has ended its run" in capsys.readouterr().out
    assert main(["where", str(tmp_path / "nowhere")]) == 2


@pytest.mark.slow
def test_run_json_has_the_environments_of_processes_that_differ(tmp_path: Path):
    def body(rank: int) -> Any:
        made = make(linear(), DataLoader(pairs(12), 6), EventRecorder(tmp_path))
        for each in made.agreement.processes[1:]:
            each["environment"] = {"torch": "another"}
        made.train()
        return len(made.processes)

    assert [each.value for each in in_processes(body, 3)] == [3, 0, 0]
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [each["environment"]["torch"] for each in start["processes"]] == [torch.__version__, "another", "another"]


def test_run_json_has_the_host_and_the_environment_of_each_process(tmp_path: Path):
    finish(tmp_path)
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    first, second = start["processes"]
    assert first["environment"]["torch"] == torch.__version__
    assert "environment" not in second, "it is the same"
    assert len({each["pid"] for each in start["processes"]}) == 2
    assert start["processes"][0]["pid"] == start["pid"]


def sparse(run: Path, epochs: int, **recording: Any) -> Trainer:
    """The processes have losses of other samples: their logs are not of one size."""
    saver = Checkpointer(run, every=Every(iterations=250), keep_last=20)
    handlers = [EventRecorder(run, **recording), saver, Fingerprints(Every(iterations=200))]
    return make(linear(), DataLoader(pairs(32), 4), *handlers, max_epochs=epochs, log_every_n_steps=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "recording"),
    [(40, {"every": 3}), pytest.param(200, {"max_bytes": 100_000}, marks=pytest.mark.slow)],
    ids=["every", "max_bytes"],
)
def test_logs_that_leave_events_out_are_continued_and_compared(epochs: int, recording: dict[str, int], tmp_path: Path):
    iterations = 8 * epochs

    def made_in(rank: int) -> Trainer:
        budget = {name: value * (1 + rank) if name == "max_bytes" else value for name, value in recording.items()}
        return sparse(tmp_path, epochs, **budget)  # of one size, both logs would lack the same events

    def cut(rank: int) -> None:
        made = made_in(rank)
        if rank == 0:
            at = Events.ITERATION_COMPLETED(once=iterations - 40)
            made.on(at)(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    def resumed(rank: int) -> int:
        made = made_in(rank)
        made.train(resume="latest")
        return made.state.iteration

    assert in_processes(cut)[0].status == -signal.SIGKILL
    assert [(each.error, each.value) for each in in_processes(resumed)] == [("", iterations)] * 2
    for rank in (0, 1):
        log = EventLog(tmp_path, rank)
        assert log.verify() == []
        assert log.ended
        found = iterations_in(tmp_path, rank)
        if "every" in recording:
            assert found == list(range(3, iterations + 1, 3))
        else:
            assert found == sorted(set(found))
            assert {*range(100, 1600, 100), *range(1500, 1601)} <= set(found)
            assert (7 in found) == (rank == 1), "the budget of rank 0 alone is reached"
        assert len(list(log.read(event="epoch_completed"))) == epochs
        assert len(list(log.read(event="state_fingerprinted"))) == iterations // 200
    found = diff_ranks(tmp_path)
    assert not found, str(found)
    assert found.agreed > iterations // 3


@pytest.mark.slow
def test_a_difference_between_logs_that_leave_events_out_is_found(tmp_path: Path):
    def body(rank: int) -> None:
        made = sparse(tmp_path, 200, max_bytes=100_000)
        if rank == 1:
            made.on(Events.ITERATION_COMPLETED(once=101))(change_a_rate)
        made.train()

    assert {each.error for each in in_processes(body)} == {""}
    found = diff_ranks(tmp_path)
    assert found.event is not None
    assert found.rank == 1
    assert 101 < found.event.iteration <= 200
