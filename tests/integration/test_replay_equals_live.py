"""A handler does in a replay what it did in the run: the same calls, final state and files."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.events.payloads import payload_fields
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import (
    Callback,
    CallbackList,
    Checkpointer,
    ConsoleLogger,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    JSONLinesLogger,
    LossSpikeGuard,
    LRMonitor,
    LRScheduler,
    Plots,
    ProgressBar,
    ReduceLROnPlateau,
    StepLimit,
    TimeLimit,
)
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.metric_values.step_values import scalars
from pulsetrain.handlers.run_files.ownership import FolderUse

ROWS, BATCH, EPOCHS = 40, 4, 4
COUNTERS = ("epoch", "iteration", "update", "validation_round", "save")


class Hooks(Callback):
    """Each hook, with what it finds."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.found.append(("train begins", trainer.state.iteration, trainer.state.stop_reason))

    def on_train_end(self, trainer: Any) -> None:
        self.found.append(("train ends", trainer.state.iteration, dict(trainer.state.metrics)))

    def on_epoch_begin(self, trainer: Any) -> None:
        self.found.append(("epoch begins", trainer.state.epoch))

    def on_epoch_end(self, trainer: Any) -> None:
        self.found.append(("epoch ends", trainer.state.epoch, dict(trainer.state.metrics)))

    def on_step_begin(self, trainer: Any) -> None:
        self.found.append(("step begins", trainer.state.iteration, trainer.state.output))

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        self.found.append(("step ends", trainer.state.iteration, loss.item()))

    def on_validation_begin(self, trainer: Any) -> None:
        self.found.append(("validation begins", trainer.state.validation_round))

    def on_validation_end(self, trainer: Any, metrics: Any) -> None:
        evaluator = trainer.evaluator.state
        self.found.append(("validation ends", dict(metrics), evaluator.epoch, evaluator.iteration))


def schedule_of_its_own() -> LRScheduler:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return LRScheduler(Cosine(initial_lr=1.0, total_steps=30), optimizer)


MAKE: dict[str, Callable[[Path, io.StringIO], Any]] = {
    "LossSpikeGuard": lambda folder, stream: LossSpikeGuard(2.0, 8, every=Every(iterations=3), patience=3),
    "EarlyStopping": lambda folder, stream: EarlyStopping(patience=2, min_delta=0.5),
    "ConsoleLogger": lambda folder, stream: ConsoleLogger(stream=stream, format="json"),
    "ConsoleLogger at a cadence": lambda folder, stream: ConsoleLogger(
        Every(iterations=3, epochs=1), "json", stream=stream
    ),
    "CSVLogger": lambda folder, stream: CSVLogger(folder),
    "CSVLogger at a cadence": lambda folder, stream: CSVLogger(folder, Every(updates=3)),
    "JSONLinesLogger": lambda folder, stream: JSONLinesLogger(folder),
    "JSONLinesLogger at a cadence": lambda folder, stream: JSONLinesLogger(folder, Every(updates=3)),
    "ProgressBar": lambda folder, stream: ProgressBar(stream, clock=lambda: 0.0),
    "Plots": lambda folder, stream: Plots(folder, formats=("svg",)),
    "Plots at a cadence": lambda folder, stream: Plots(folder, Every(iterations=15), formats=("png",)),
    "CallbackList": lambda folder, stream: CallbackList([Hooks()]),
    "EventRecorder": lambda folder, stream: EventRecorder(folder),
    "LRScheduler": lambda folder, stream: schedule_of_its_own(),
    "LRMonitor": lambda folder, stream: LRMonitor(Every(iterations=3)),
    "ReduceLROnPlateau": lambda folder, stream: ReduceLROnPlateau(
        patience=0, threshold=0.5, optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    ),
    "StepLimit": lambda folder, stream: StepLimit(iterations=1000),
    "TimeLimit": lambda folder, stream: TimeLimit("2h"),
}
# a run that validates, saves and logs by other cadences; one that a handler ends; one that fails and continues
SCENARIOS: dict[str, dict[str, Any]] = {
    "epochs": {"log_every_n_steps": 5},
    "iterations": {"log_every_n_steps": 2, "validate_every": Every(iterations=4), "accumulate": 2},
    "stopped": {"log_every_n_steps": 5, "early_stopping": True},
    "resumed": {"log_every_n_steps": 5, "fails_at": 26},
}


@dataclass
class Played:
    """The actions of a handler."""

    handler: Any
    folder: Path
    stream: io.StringIO
    calls: list[Any] = field(default_factory=list)

    @property
    def state(self) -> Any:
        state = self.handler.state_dict() if hasattr(self.handler, "state_dict") else None
        if isinstance(self.handler, EventRecorder):
            state.pop("run", None)  # each log has an id of its own,
            state.pop("seams", None)  # and a replay writes one without resumes
            state.pop("starts", None)
        return state

    @property
    def findings(self) -> list[Any]:
        return [each.found for each in self.handler] if isinstance(self.handler, CallbackList) else []

    @property
    def files(self) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.parent.name != "events" and path.name != "run.json":
                files[str(path.relative_to(self.folder))] = path.read_bytes()
        if (self.folder / "events").exists():
            files["events"] = list(EventLog(self.folder).read())
        return files

    @property
    def lines(self) -> list[Any]:
        text = self.stream.getvalue().splitlines()
        if not text or not text[0].startswith("{"):
            return text
        left_out = ("timestamp", "optimizer", "seed")  # a replay has neither of the latter
        return [{name: value for name, value in json.loads(line).items() if name not in left_out} for line in text]


def make(name: str, place: Path) -> Played:
    stream = io.StringIO()
    folder = place / name.replace(" ", "-")
    return Played(MAKE[name](folder, stream), folder, stream)


class NotingAttachment(Attachment):
    """Notes every call that the handler's subscriptions make."""

    calls: list[Any]

    def subscribe(self, event: Any, handler: Any, **options: Any) -> None:
        @functools.wraps(handler)
        def noted(*given: Any, **named: Any) -> Any:
            self.calls.append(seen(handler, given))
            return handler(*given, **named)

        owns_folder = isinstance(getattr(handler, "__self__", None), FolderUse)  # which a replay does not
        super().subscribe(event, handler if owns_folder else noted, **options)

    __call__ = subscribe


def spy_on(played: Played) -> None:
    """Note every call that the handler's subscriptions make."""
    of_list: dict[Any, Any] = getattr(played.handler, "_attachments", {})
    for attachment in of_list.values() or [played.handler._attachment]:
        attachment.__class__, attachment.calls = NotingAttachment, played.calls


def seen(handler: Any, given: tuple[Any, ...]) -> Any:
    """A call: its handler, its arguments, and the state at that time."""
    name = getattr(handler, "__qualname__", "")
    if not given:
        return name
    engine = given[0]
    output = {key: float(value) for key, value in scalars(engine.state.output).items()}
    found = [name, engine.name, *(getattr(engine.state, counter) for counter in COUNTERS), output]
    if len(given) > 1:
        event = given[1]
        payload = {} if event.payload is None else payload_fields(event.payload)
        values = {key: plain(value) for key, value in payload.items()}
        found += [event.seq, event.type, event.engine, event.epoch, event.iteration, event.time_ns, values]
    return found


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else value


def make_trainer(folder: Path, played: list[Played], options: dict[str, Any]) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    settings = {name: value for name, value in options.items() if name not in ("early_stopping", "fails_at")}
    ending = [EarlyStopping(patience=1, min_delta=3.0)] if "early_stopping" in options else []
    return Trainer(
        model,
        DataLoader(data, batch_size=BATCH, shuffle=True),
        DataLoader(data, batch_size=BATCH),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(
            max_epochs=EPOCHS,
            optimizer="sgd",
            learning_rate=0.01,
            schedule=None,
            seed=3,
            clip_grad_norm=1.0,
            **settings,
        ),
        handlers=[EventRecorder(folder), *(each.handler for each in played), *ending, Checkpointer(folder)],
    )


@pytest.fixture(scope="module", params=SCENARIOS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with every handler, and their actions; if it fails and continues, their actions after that."""
    place, options = tmp_path_factory.mktemp(request.param), SCENARIOS[request.param]
    folder = place / "run"
    played = {name: make(name, place / "live") for name in MAKE}
    for each in played.values():
        spy_on(each)
    trainer = make_trainer(folder, [*played.values()], options)
    if "fails_at" in options:

        @trainer.on(Events.ITERATION_COMPLETED(once=options["fails_at"]))
        def fail() -> None:
            raise RuntimeError("the power went")

        with pytest.raises(RuntimeError, match="the power went"):
            trainer.train()
        again = {name: make(name, place / "live") for name in MAKE}
        for handler in (trainer.handlers[0], played["EventRecorder"].handler):
            handler.detach()
        trainer = make_trainer(folder, [*(each for each in again.values())], options)
        trainer.train(resume="latest")
        played = {name: Played(again[name].handler, each.folder, again[name].stream) for name, each in played.items()}
    else:
        trainer.train()
    trainer.handlers[0].detach()
    played["EventRecorder"].handler.detach()
    return folder, (trainer, played, request.param)


def replayed(folder: Path, names: list[str], place: Path, trainer: Any) -> Any:
    played = {name: make(name, place) for name in names}
    replay = Replay(folder)
    if replay.state.max_epochs is None:
        replay.state.max_epochs, replay.state.epoch_length = trainer.state.max_epochs, trainer.state.epoch_length
    for each in played.values():
        spy_on(each)
        each.handler.attach(replay)
    replay.run()
    for each in played.values():
        if isinstance(each.handler, EventRecorder):
            each.handler.detach()
    return replay, played


def assert_equal(name: str, found: Played, expected: Played, scenario: str) -> None:
    assert found.state == expected.state
    if scenario != "resumed":  # otherwise the calls and lines of the first process belong to another object
        assert found.calls == expected.calls
        assert found.findings == expected.findings
        assert found.lines == expected.lines
        assert found.files == expected.files
    assert found.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_a_handler_does_in_a_replay_what_it_did_in_the_run(name: str, live: Any, tmp_path: Path) -> None:
    folder, (trainer, expected, scenario) = live
    _, found = replayed(folder, [name], tmp_path, trainer)
    assert_equal(name, found[name], expected[name], scenario)


@pytest.mark.slow
def test_all_of_them_together_do_the_same(live: Any, tmp_path: Path) -> None:
    folder, (trainer, expected, scenario) = live
    replay, found = replayed(folder, [*MAKE], tmp_path, trainer)
    for name in MAKE:
        assert_equal(name, found[name], expected[name], scenario)
    for counter in COUNTERS:
        assert getattr(replay.state, counter) == getattr(trainer.state, counter), counter
    if not replay.stops:
        assert replay.state.stop_reason == trainer.state.stop_reason


@pytest.mark.slow
def test_the_handlers_that_may_have_ended_the_run_would_end_the_replay_there(live: Any) -> None:
    folder, (trainer, *_) = live
    replay = Replay(folder, obey_terminate=True)
    for handler in trainer.handlers:
        if isinstance(handler, EarlyStopping):
            EarlyStopping(handler.metric, handler.patience, handler.mode, handler.min_delta).attach(replay)
    state = replay.run()
    assert state.stop_reason == trainer.state.stop_reason
    assert (state.epoch, state.iteration) == (trainer.state.epoch, trainer.state.iteration)
