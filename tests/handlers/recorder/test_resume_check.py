"""A resumed run is compared with the events in its log after the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.events.payloads import MetricsLogged
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers import Checkpointer, EventRecorder, NaNGuard
from pulsetrain.handlers.recorder.resume_check import ResumeCheck


def make(
    folder: Path,
    *,
    scale: float = 1.0,
    activation: nn.Module | None = None,
    grad_norm: bool | None = True,
    log_every: int = 5,
) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(40, 4)
    data = TensorDataset(inputs * scale, inputs.sum(1, keepdim=True))
    return Trainer(
        nn.Sequential(nn.Linear(4, 8), activation or nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)),
        DataLoader(data, batch_size=4, shuffle=True),
        DataLoader(data, batch_size=20),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=3, log_every_n_steps=log_every, accumulate=2, seed=0),
        handlers=[
            Checkpointer(folder, every=Every(iterations=6), keep_last=20),
            EventRecorder(folder, grad_norm=grad_norm),
        ],
    )


def killed_at(run: Trainer, iteration: int, event: Events = Events.ITERATION_COMPLETED) -> None:
    """Train, and leave the log on disk as a process leaves it that is killed at this event."""
    folder: Path = run.handlers[1].folder
    kept = folder.with_name("kept")

    @run.on(event(once=iteration), phase=3)
    def pull(engine: Trainer) -> None:
        shutil.copytree(folder, kept)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.train()
    shutil.rmtree(folder)
    kept.rename(folder)


def said(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"].startswith("resumed")]


def test_a_resume_that_is_exact_says_so_once_with_the_number_of_events(tmp_path: Path):
    killed_at(make(tmp_path), 17)  # the last checkpoint is at 12
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "info"
    assert "exactly" in entry["event"]
    check = run.handlers[1].resume_check
    # 5 iterations: started and completed, two updates' events and one log point
    assert entry["events"] == check.agreed == 5 * 2 + 2 * 2 + 1
    assert entry["with_loss_or_norm"] == 5 + 2
    assert entry["after_update"] == 3 + 1  # iterations 15 to 17: the first update is made in iteration 14
    assert (check.waiting, check.difference) == (False, None)


class Softening(nn.Module):
    """Counts its calls, which changes nothing."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs.relu()


@pytest.mark.parametrize("log_every", [5, 2])
def test_a_resume_whose_checkpoint_lacks_state_is_never_said_to_be_exact(log_every: int, tmp_path: Path):
    killed_at(make(tmp_path, activation=Softening()), 17)
    run = make(tmp_path, activation=Softening(), log_every=log_every)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "exactly" not in entry["event"], entry
    assert entry["event"] == (
        "resumed; what was compared is equal, and the checkpoint lacks state that the run had changed"
    )
    check = run.handlers[1].resume_check
    assert entry["lacks"] == ["model.1.calls"]
    assert (entry["events"], entry["with_loss_or_norm"], entry["after_update"]) == (
        check.agreed, check.with_values, check.after_update,
    )  # fmt: skip
    assert check.after_update > 0


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_measures_gradient_norms_if_the_interrupted_one_did(before: bool, tmp_path: Path):
    killed_at(make(tmp_path, grad_norm=before), 17)
    run = make(tmp_path, grad_norm=None)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "exactly" in entry["event"]
    norms = [event.iteration for event in EventLog(tmp_path).read(event="gradients_ready")]
    assert (norms[-1:] == [30]) == before
    assert bool(norms) == before


@pytest.mark.parametrize("killed", [13, 14, 15])
def test_only_a_value_that_was_computed_after_an_update_makes_a_resume_exact(tmp_path: Path, killed: int):
    """Between checkpoint and kill: an accumulation, one update whose loss comes before it, and one loss after it."""
    killed_at(make(tmp_path), killed)  # the last checkpoint is at 12
    with structlog.testing.capture_logs() as logs:
        make(tmp_path).train(resume="latest")
    (entry,) = said(logs)
    assert entry["with_loss_or_norm"] > 0
    assert ("exactly" in entry["event"]) == (killed == 15)
    assert ("computed after an update" in entry["event"]) == (killed < 15)


@pytest.mark.parametrize(("losses", "exact"), [(1, False), (2, True)])
def test_each_iteration_of_an_engine_without_update_events_counts_as_an_update(losses: int, exact: bool):
    events = logged([("iteration_completed", 13 + n, 0.5) for n in range(losses)])
    check = ResumeCheck(iter(events), "trainer", fires_updates=False)
    with structlog.testing.capture_logs() as logs:
        for event in events:
            check.see(event)
    (entry,) = said(logs)
    assert ("exactly" in entry["event"]) == exact


@pytest.mark.slow
@pytest.mark.parametrize("killed", [13, 14, 17])
@pytest.mark.parametrize("changed", [{"scale": 1.5}, {"activation": nn.GELU()}], ids=["inputs", "model"])
def test_a_resume_that_computes_something_else_is_never_said_to_be_exact(
    tmp_path: Path, killed: int, changed: dict[str, Any]
):
    killed_at(make(tmp_path), killed)  # the last checkpoint is at 12
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, **changed).train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "warning"
    assert "iteration 13: output.loss: " in entry["first"]


def test_without_a_loss_in_the_log_nothing_is_said_to_be_exact(tmp_path: Path):
    killed_at(make(tmp_path), 13, Events.ITERATION_STARTED)
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, scale=1.5).train(resume="latest")
    (entry,) = said(logs)
    assert entry["event"] == "resumed; nothing to compare"
    assert entry["events"] == 1


def test_a_log_that_ends_at_the_checkpoint_has_nothing_to_compare(tmp_path: Path):
    killed_at(make(tmp_path), 2, Events.CHECKPOINT_SAVED)  # after iteration 12
    with structlog.testing.capture_logs() as logs:
        make(tmp_path).train(resume="latest")
    (entry,) = said(logs)
    assert entry["event"] == "resumed; nothing to compare"


def test_a_resumed_run_that_ends_before_the_log_does_says_how_far_it_was_compared(tmp_path: Path):
    killed_at(make(tmp_path), 17)
    run = make(tmp_path)
    run.add_event_handler(Events.ITERATION_COMPLETED(once=15), run.terminate)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "ended before" in entry["event"]
    assert entry["agreed"] == run.handlers[1].resume_check.agreed > 0
    assert entry["with_loss_or_norm"] == 3 + 1


def test_a_difference_names_the_first_event_with_both_sides(tmp_path: Path):
    killed_at(make(tmp_path), 17)
    run = make(tmp_path)

    @run.on(Events.ITERATION_STARTED(once=15))
    def disturb() -> None:
        torch.rand(1)  # a draw that was not there before

    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "warning"
    assert entry["first"].startswith("trainer's iteration_completed at epoch 2, iteration 15: output.loss: ")
    assert " in the log, " in entry["first"]
    assert entry["agreed_before"] > 0


def test_the_end_of_a_finished_run_is_compared_too(tmp_path: Path):
    make(tmp_path).train()  # the last checkpoint is at 30, before the last epoch's end and its validation
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["log_level"] == "info"
    assert run.handlers[1].resume_check.waiting is False


def test_an_event_that_is_not_repeated_is_a_difference(tmp_path: Path):
    first = make(tmp_path)
    first.register_events("spike_seen")
    first.add_event_handler(Events.ITERATION_COMPLETED(once=16), lambda engine: engine.fire("spike_seen"))
    killed_at(first, 17)
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert entry["first"] == (
        "trainer's spike_seen at epoch 2, iteration 16 is in the log; "
        "trainer's iteration_started at iteration 17 was fired instead"
    )


def logged(events: list[tuple[str, int, float]], *, seq: int = 0, ord: int = 0) -> list[LoggedEvent]:
    return [
        LoggedEvent(ord + n, "trainer", event, epoch=1, iteration=i, output={"loss": loss}, seq=seq + n)
        for n, (event, i, loss) in enumerate(events)
    ]


def test_of_several_attempts_the_longest_counts(tmp_path: Path):
    writer = LogWriter(tmp_path)
    done = "iteration_completed"
    for event in logged([(done, 4, 9.0), (done, 5, 1.0), (done, 6, 2.0)]):
        writer.add(event)
    writer.rewind(after=0, ord=1, seq=3, t=0)  # from the checkpoint after the first
    for event in logged([(done, 5, 1.0)], seq=4, ord=1):
        writer.add(event)
    writer.rewind(after=-1, ord=0, seq=5, t=0)  # from one before
    for event in logged([(done, 4, 7.0)], seq=6, ord=0):
        writer.add(event)
    check = ResumeCheck.of_log(EventLog(tmp_path), after=0, engine="trainer")
    writer.close()
    assert check is not None
    again = logged([(done, 5, 1.0), (done, 6, 2.0000000000000004)], seq=9, ord=1)
    check.see(again[0])
    assert (check.agreed, check.difference, check.waiting) == (1, None, True)
    check.see(again[1])
    assert check.difference is not None
    assert "output.loss: 2.0 in the log" in check.difference
    assert ResumeCheck.of_log(EventLog(tmp_path), after=99, engine="trainer") is None


NORM = "gradients_ready"


def events_of(text: str) -> list[LoggedEvent]:
    """Events from letters: s starts an iteration, n has the norm, u is the update, c completes; N is an open norm."""
    names = {
        "s": "iteration_started",
        "n": NORM,
        "N": NORM,
        "u": "optimizer_step_completed",
        "c": "iteration_completed",
    }
    found = []
    for ord, letter in enumerate(text):
        iteration = 1 + text[:ord].count("c")
        payload = {"grad_norm": 0.5 * iteration} if letter == "n" else None
        output = {"loss": 1.0 / iteration} if letter == "c" else None
        event = LoggedEvent(10 + ord, "trainer", names[letter], 1, iteration, payload, output, seq=10 + ord)
        event.open = letter == "N"
        found.append(event)
    return found


@pytest.mark.parametrize(
    ("log", "now", "left_out", "agree"),
    [
        ("snucsnuc", "sucsuc", [NORM], True),
        ("sucsuc", "snucsnuc", [NORM], True),
        ("snucsnuc", "snucsnuc", [], True),
        ("sucsuc", "sucsuc", [], True),
        ("nucsnuc", "ucsuc", [NORM], True),
        ("snucsNuc", "sucsuc", [NORM], True),
        ("snucsnuc", "snucsuc", [], False),  # only some of one side's
        ("snucsuc", "snucsnuc", [], False),
        ("snucsuc", "sucsnuc", [NORM], False),  # some of either side
        ("sucsnuc", "snucsuc", [NORM], False),
        ("snucsnuc", "sucssc", [NORM], False),  # another event lacks as well
    ],
)
def test_gradient_norms_are_left_out_where_only_one_side_has_any(log: str, now: str, left_out: list[str], agree: bool):
    check = ResumeCheck(iter(events_of(log)))
    for event in events_of(now):
        check.see(event)
    assert (check.difference is None, check.difference) == (agree, None if agree else check.difference)
    if agree:
        assert not check.waiting
        assert check.agreed == min(len(log), len(now))
        assert check.left_out == left_out


def test_a_difference_is_found_where_norms_are_left_out():
    check = ResumeCheck(iter(events_of("snucsnuc")))
    now = events_of("sucsuc")
    now[-1].output = {"loss": 0.25}
    for event in now:
        check.see(event)
    assert (
        check.difference
        == "trainer's iteration_completed at epoch 1, iteration 2: output.loss: 0.5 in the log, 0.25 now"
    )


@pytest.mark.parametrize(("before", "now"), [([], [NaNGuard]), ([NaNGuard], [])], ids=["added", "removed"])
def test_a_guard_may_be_added_or_removed_at_a_resume(tmp_path: Path, before: list[Any], now: list[Any]):
    first = make(tmp_path, grad_norm=False)
    for guard in before:
        guard().attach(first)
    killed_at(first, 25)  # in the third epoch; the last checkpoint is at 24
    kept = CheckpointManager(tmp_path / "checkpoints")
    while (latest := kept.get_latest()) is not None and load_checkpoint(latest)["counters"]["iteration"] > 12:
        shutil.rmtree(latest)
    run = make(tmp_path, grad_norm=False)
    for guard in now:
        guard().attach(run)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "exactly" in entry["event"], entry
    assert entry["not_compared"] == [NORM]


@pytest.mark.parametrize(("before", "now"), [(5, 2), (50, 3), (3, 5)])
def test_the_log_points_may_change_at_a_resume(tmp_path: Path, before: int, now: int):
    killed_at(make(tmp_path, log_every=before), 17)  # the last checkpoint is at 12
    run = make(tmp_path, log_every=now)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "exactly" in entry["event"], entry
    assert entry.get("not_compared") == ["metrics_logged"]


def test_log_points_are_compared_where_they_have_not_changed(tmp_path: Path):
    killed_at(make(tmp_path), 17)
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    (entry,) = said(logs)
    assert "not_compared" not in entry


def test_times_and_rates_are_not_compared(tmp_path: Path):
    for folder, rate in ((tmp_path / "a", 10.0), (tmp_path / "b", 99.0)):
        engine = Engine(lambda engine, batch: None, name="trainer")
        recorder = EventRecorder(folder).attach(engine)
        metrics = {"train/loss": 1.0, "samples_per_second": rate}
        engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics))
        recorder.detach()
    before, now = (list(EventLog(tmp_path / name).read()) for name in "ab")
    assert before[0].payload == {"metrics": {"train/loss": 1.0, "samples_per_second": 10.0}}
    check = ResumeCheck(iter(EventLog(tmp_path / "a").read()))
    check.see(now[0])
    assert (check.agreed, check.difference) == (1, None)
