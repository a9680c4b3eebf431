"""What a checkpoint cannot hold is told when a run starts: data read once or with generators of its own, handlers
without a state or half of one, objects that functions reach; numbers that change without being saved, at the save.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import structlog
import torch
from ignite.handlers import Timer
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, Subset

from engine import CheckpointError, Events, Every, SupervisedStrategy
from handlers import (
    Callback,
    Checkpointer,
    ConsoleLogger,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    LossCurve,
    ProgressBar,
)
from pulsetrain import Trainer
from tests.pulsetrain.small import loader, pairs, regression_model, trainer
from tests.pulsetrain.test_resume import cut_after


class Handler:
    """A user's: hears by one of its methods."""

    def attach(self, engine: Any) -> Self:
        self.handles = [engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)]
        return self

    def look(self, engine: Any) -> None:
        """Nothing to do."""


class Holding(Handler):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("count", "name", "unset")

    def __init__(self) -> None:
        self.count, self.name = 0, "mine"

    def attach(self, engine: Any) -> Self:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)
        return self

    def look(self, engine: Any) -> None:
        self.count += 1


class Saved(Handler):
    """Has a state, of any kind."""

    def __init__(self, state: Any) -> None:
        self.state, self.calls = state, 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class OnlySaves(Handler):
    def state_dict(self) -> dict[str, Any]:
        return {}


class OnlyLoads(Handler):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any, loss: Any) -> None:
        self.steps += 1


class SavedCounting(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Called(SavedCounting):
    """Hears by being called."""

    def __call__(self, engine: Any) -> None:
        self.steps += 1


def make(folder: Path | None, *handlers: Any, epochs: int = 1, every: Every | None = None, **arguments: Any) -> Trainer:
    saving = [] if folder is None else [Checkpointer(folder, every=every, at_end=False)]
    return trainer({"max_epochs": epochs, "seed": 1}, handlers=[*saving, *handlers], **arguments)


def told(run: Trainer) -> list[dict[str, Any]]:
    """The warnings of a run, without their level."""
    with structlog.testing.capture_logs() as logs:
        run.train()
    return [{k: v for k, v in entry.items() if k != "log_level"} for entry in logs if entry["log_level"] == "warning"]


def named(warnings: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [
        (each["handler"], each["attributes"]) for each in warnings if "attributes that may be progress" in each["event"]
    ]


@pytest.mark.parametrize(
    "value",
    [0, 0.0, False, [], {}, set(), deque(), Counter(), np.zeros(2), torch.zeros(2)],
    ids=lambda v: type(v).__name__,
)
def test_a_handler_with_what_may_be_progress_and_no_state_is_named_once(value: Any, tmp_path: Path):
    assert named(told(make(tmp_path, Holding(seen=value, name="mine", best=None), epochs=3))) == [("Holding", ["seen"])]


def test_the_warning_says_what_to_do(tmp_path: Path):
    (warning,) = told(make(tmp_path, Holding(seen=1)))
    assert "give it state_dict() and load_state_dict()" in warning["event"]
    assert "{} says that nothing is to be kept" in warning["event"]


def test_attributes_in_slots_are_seen(tmp_path: Path):
    assert named(told(make(tmp_path, Slotted()))) == [("Slotted", ["count"])]


def test_callbacks_and_what_listens_by_a_method_or_as_a_callable_are_seen(tmp_path: Path):
    class Called(Counting):
        def __call__(self, engine: Any) -> None:
            self.steps += 1

    run = make(tmp_path, callbacks=[Counting()])
    run.add_event_handler(Events.ITERATION_COMPLETED, Holding(seen=1).look)
    run.add_event_handler(Events.ITERATION_COMPLETED, partial(Holding(later=1).look))
    run.add_event_handler(Events.EPOCH_COMPLETED, Called())
    names = [("Counting", ["steps"]), ("Holding", ["seen"]), ("Holding", ["later"]), ("Called", ["steps"])]
    assert named(told(run)) == names


def test_settings_are_not_progress(tmp_path: Path):
    class Configured(Handler):
        def __init__(self, length: int = 3, scale: float = 2.0) -> None:
            self.length, self._scale, self.done = length, scale, 0

    assert named(told(make(tmp_path, Configured()))) == [("Configured", ["done"])]


@pytest.mark.parametrize(
    "handler", [Handler(), Holding(name="mine", best=None, model=torch.nn.Linear(1, 1)), Saved({})]
)
def test_a_handler_that_holds_nothing_or_has_a_state_is_not_warned_of(handler: Any, tmp_path: Path):
    assert told(make(tmp_path, handler)) == []


def test_functions_builtins_and_libraries_are_not_warned_of(tmp_path: Path):
    run = make(tmp_path)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: None)
    run.add_event_handler(Events.EPOCH_COMPLETED, id)
    run.add_event_handler(Events.EPOCH_COMPLETED, Holding)
    run.add_event_handler(Events.EPOCH_COMPLETED, Timer().pause)
    assert told(run) == []


def test_our_own_handlers_are_not_warned_of(tmp_path: Path):
    handlers = [
        ConsoleLogger(),
        CSVLogger(tmp_path / "t.csv"),
        EventRecorder(tmp_path / "e.jsonl"),
        LossCurve(tmp_path),
        ProgressBar(),
    ]
    run = make(tmp_path / "run", EarlyStopping(patience=9), *handlers, val_loader=loader(8))
    assert told(run) == []


def test_without_a_checkpointer_nothing_is_said(tmp_path: Path):
    run = trainer({"max_iterations": 3}, train_loader=iter(loader()), handlers=[Holding(seen=1), OnlySaves()])
    assert told(run) == []
    assert told(make(None, Saved({"x": object()}))) == []


@pytest.mark.parametrize(
    ("handler", "there", "lacking"),
    [(OnlySaves(), "state_dict", "load_state_dict"), (OnlyLoads(), "load_state_dict", "state_dict")],
)
def test_half_a_state_is_told_of(handler: Any, there: str, lacking: str, tmp_path: Path):
    (warning,) = told(make(tmp_path, handler))
    assert warning["handler"] == type(handler).__name__
    assert f"has {there}() and no {lacking}()" in warning["event"]


# --------------------------------------------------------------------------------------------- data read once


def iterator_warnings(data: Any, folder: Path) -> list[str]:
    checkpointer = Checkpointer(folder, every=Every(epochs=9), at_end=False)
    run = trainer({"max_iterations": 3}, train_loader=data, handlers=[checkpointer])
    return [each["loader"] for each in told(run) if "can be read once" in each["event"]]


def test_an_iterator_is_told_of_and_what_can_be_read_again_is_not(tmp_path: Path):
    assert iterator_warnings((batch for batch in loader()), tmp_path) == ["generator"]
    for data in (loader(), list(loader()), loader(num_workers=1)):
        assert iterator_warnings(data, tmp_path) == []


def test_an_iterator_that_keeps_its_state_is_not_told_of(tmp_path: Path):
    class Keeping:
        def __init__(self) -> None:
            self.batches = iter(loader())

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(self.batches)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to do."""

    assert iterator_warnings(Keeping(), tmp_path) == []


# --------------------------------------------------------------------------------- states that cannot be saved


def test_a_state_that_no_checkpoint_can_hold_ends_the_run_before_its_first_batch(tmp_path: Path):
    handler = Saved({"inside": [object()]})
    run = make(tmp_path, handler)
    with pytest.raises(
        CheckpointError, match=r"checkpoint\['handlers'\]\['Saved'\]\['inside'\]\[0\]: builtins.object|object"
    ):
        run.train()
    assert run.state.iteration == 0
    with pytest.raises(CheckpointError) as at_start:
        run.train()
    assert run.state.iteration == 0
    assert str(at_start.value).startswith("checkpoint['handlers']['Saved']['inside'][0]: object: could not be loaded")
    with pytest.raises(CheckpointError) as at_save:
        run.save_checkpoint()
    assert str(at_save.value) == str(at_start.value)


def test_a_state_dict_that_raises_is_named(tmp_path: Path):
    class Failing(Saved):
        def state_dict(self) -> Any:
            raise ZeroDivisionError(self.state["x"])

    run = make(tmp_path)
    Failing({"x": 1}).attach(run)
    with pytest.raises(ZeroDivisionError) as caught:
        run.train()
    assert run.state.iteration == 0
    assert any("Failing.state_dict()" in note for note in caught.value.__notes__)


# ----------------------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("callback", [True, False], ids=["a callback", "a callable"])
def test_a_callback_and_a_callable_with_a_state_go_on(callback: bool, tmp_path: Path):
    def counted() -> tuple[Trainer, SavedCounting]:
        counting = SavedCounting() if callback else Called()
        run = make(tmp_path, epochs=2, every=Every(iterations=1), callbacks=[counting] if callback else [])
        if not callback:
            run.add_event_handler(Events.ITERATION_COMPLETED, counting)
        return run, counting

    run, _ = counted()
    cut_after(run, 13)
    again, counting = counted()
    again.train(resume="latest")
    assert counting.steps == 20


def test_a_handler_with_slots_and_a_state_goes_on(tmp_path: Path):
    class Keeping(Slotted):
        __slots__ = ()

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    cut_after(make(tmp_path, Keeping(), epochs=2, every=Every(iterations=1)), 13)
    handler = Keeping()
    make(tmp_path, handler, epochs=2).train(resume="latest")
    assert handler.count == 20


# ------------------------------------------------------------------------------- generators of the data's own


PAIRS = pairs()


class Noisy(Dataset[Any]):
    """Holds what its attributes say."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return PAIRS[index]


class Shuffling(Sampler[int]):
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


class Jitter:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, batch: Any) -> Any:
        return torch.utils.data.default_collate(batch)


class Own(DataLoader[Any]):
    """Is not taken over."""


def generator_warnings(data: Any, folder: Path) -> list[str]:
    run = trainer(
        {"max_iterations": 2}, train_loader=data, handlers=[Checkpointer(folder, every=Every(epochs=9), at_end=False)]
    )
    return [
        path for each in told(run) if "random generators of its own" in each["event"] for path in each["generators"]
    ]


def collate_with_default(batch: Any, generator: Any = np.random.default_rng(1)) -> Any:  # noqa: B008
    return torch.utils.data.default_collate(batch)


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
)
@pytest.mark.parametrize("kind", [DataLoader, Own])
def test_a_generator_of_the_datas_own_is_named_wherever_it_is(kind: Any, generator: Any, tmp_path: Path):
    def closing(batch: Any) -> Any:
        return torch.utils.data.default_collate(batch) if generator else None

    found = {
        "dataset.rng": kind(Noisy(rng=generator), 4),
        "dataset.dataset.rng": kind(Subset(Noisy(rng=generator), range(40)), 4),
        "dataset.transforms[1].generator": kind(Noisy(transforms=[None, Jitter(generator)]), 4),
        "dataset.by_name['a'].generator": kind(Noisy(by_name={"a": Jitter(generator)}), 4),
        "collate_fn.generator": kind(Noisy(), 4, collate_fn=Jitter(generator)),
    }
    for path, data in found.items():
        assert generator_warnings(data, tmp_path) == [path]
    assert generator_warnings(kind(Noisy(), 4, collate_fn=closing), tmp_path) == ["collate_fn.generator"]
    assert generator_warnings(kind(Noisy(), 4, collate_fn=collate_with_default), tmp_path) == ["collate_fn.generator"]
    if not isinstance(generator, torch.Generator):
        assert generator_warnings(kind(Noisy(), 4, sampler=Shuffling(generator)), tmp_path) == ["sampler.generator"]
        batches = BatchSampler(Shuffling(generator), 4, False)
        assert generator_warnings(kind(Noisy(), batch_sampler=batches), tmp_path) == ["batch_sampler.sampler.generator"]


def test_a_loader_of_ones_own_that_draws_from_its_own_generator_is_named(tmp_path: Path):
    class Drawing:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(0)

        def __iter__(self) -> Iterator[Any]:
            return iter(loader())

    assert generator_warnings(Drawing(), tmp_path) == ["loader.rng"]


def test_generators_that_each_pass_seeds_or_a_checkpoint_holds_are_not_named(tmp_path: Path):
    mine = torch.Generator()
    for kind in (DataLoader, Own):
        sampler = RandomSampler(range(40), generator=mine)
        for data in (
            kind(Noisy(), 4, shuffle=True, generator=mine),
            kind(Noisy(), 4, sampler=sampler),
            kind(Noisy(), batch_sampler=BatchSampler(sampler, 4, False)),
            kind(Noisy(draw=random.random, module=random, torchs=torch.default_generator), 4),
            kind(Noisy(rng=random.Random(), draws_nothing=True), 4),
        ):
            assert generator_warnings(data, tmp_path) == []


@pytest.mark.parametrize("iteration", [4, 13])
def test_a_generator_in_a_batch_samplers_sampler_is_seeded_for_each_pass(iteration: int, tmp_path: Path):
    def run(folder: str, seed: int) -> Trainer:
        sampler = RandomSampler(range(40), generator=torch.Generator().manual_seed(seed))
        data = Own(Noisy(), batch_sampler=BatchSampler(sampler, 4, False))
        return make(tmp_path / folder, epochs=2, every=Every(iterations=1), train_loader=data)

    whole = run("whole", 1)
    whole.train()
    cut_after(run("cut", 2), iteration)
    again = run("cut", 3)
    again.train(resume="latest")
    assert all(torch.equal(each, again.model.state_dict()[name]) for name, each in whole.model.state_dict().items())


# ----------------------------------------------------------------------------------- what functions reach


def reached(run: Trainer) -> list[str]:
    return [each["object"] for each in told(run) if "a function that listens reaches" in each["event"]]


def test_a_function_that_reaches_a_state_that_is_not_saved_is_told_of_once(tmp_path: Path):
    run = make(tmp_path)
    scheduler = StepLR(run.optimizer, 2)
    step = scheduler.step
    helped = StepLR(run.optimizer, 3)

    def help_step() -> None:
        helped.step()

    def listens(engine: Any, counting: Any = SavedCounting()) -> None:  # noqa: B008
        help_step()

    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: step())
    run.add_event_handler(Events.EPOCH_COMPLETED, listens)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, other: None, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    run.add_event_handler(Events.EPOCH_COMPLETED, partial(lambda kept: None, torch.amp.GradScaler("cpu")))
    assert sorted(reached(run)) == ["GradScaler", "SGD", "SavedCounting", "StepLR", "StepLR"]


at_module_level = SavedCounting()


def test_a_variable_of_its_module_that_a_function_names_is_seen(tmp_path: Path):
    run = make(tmp_path)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: at_module_level.on_step_end(None, None))
    assert reached(run) == ["SavedCounting"]


def test_what_is_saved_otherwise_or_needs_no_saving_may_be_reached(tmp_path: Path):
    handler, callback = Saved({}), SavedCounting()
    run = make(tmp_path, handler, callbacks=[callback], val_loader=loader(8))
    scheduler, teacher = StepLR(run.optimizer, 2), nn.Linear(1, 1).requires_grad_(False)
    other = trainer()
    run.add_event_handler(Events.EPOCH_COMPLETED, scheduler.step)
    for each in (run, handler, callback, scheduler, teacher, other, run.model, run.model[0], run.optimizer, Saved):
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, event, each=each: each)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: (run.evaluator, run.train_loader, run.history))
    assert reached(run) == []


def test_without_a_checkpointer_no_function_is_looked_into(tmp_path: Path):
    run = make(None)
    scheduler = StepLR(run.optimizer, 2)
    run.add_event_handler(Events.EPOCH_COMPLETED, lambda: scheduler.step())
    assert told(run) == []


# --------------------------------------------------------------------------- numbers that no state holds


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        self.steps, self.rate, self.started, self.width = 0, 1.0, False, 4

    def forward(self, inputs: Any) -> Any:
        self.steps, self.rate, self.started = self.steps + 1, self.rate * 0.9, True
        return self.inner(inputs)


class CountsInItsState(Counts):
    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class CountingStrategy(SupervisedStrategy):
    def __init__(self) -> None:
        super().__init__("mse")
        self.batches = 0

    def prepare_batch(self, batch: Any) -> Any:
        self.batches += 1
        return super().prepare_batch(batch)


class SavedStrategy(CountingStrategy):
    def state_dict(self) -> Any:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


def changed(run: Trainer) -> list[list[str]]:
    return [each["attributes"] for each in told(run) if "attributes change as the run goes on" in each["event"]]


def test_numbers_that_change_and_are_in_no_checkpoint_are_named_once_at_the_first_save(tmp_path: Path):
    model = nn.Sequential(Counts())
    run = make(tmp_path, epochs=3, every=Every(iterations=1), model=model, strategy=CountingStrategy())
    assert changed(run) == [["model.0.rate", "model.0.started", "model.0.steps", "strategy.batches"]]
    assert changed(make(None, model=Counts())) == []


def test_numbers_that_a_state_holds_are_not_named(tmp_path: Path):
    assert changed(make(tmp_path, epochs=2, model=CountsInItsState(), strategy=SavedStrategy())) == []


def test_a_strategy_with_half_a_state_is_told_of(tmp_path: Path):
    class Half(CountingStrategy):
        def state_dict(self) -> Any:
            return {}

    warnings = [each["event"] for each in told(make(tmp_path, strategy=Half()))]
    assert "the strategy has state_dict() and no load_state_dict(): its state is not saved; give it both" in warnings


# ------------------------------------------------------------- what cannot be saved, of the trainer's own parts


class OddState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs)

    def get_extra_state(self) -> Any:
        return {1, 2}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to do."""


class OddLoader:
    def __iter__(self) -> Iterator[Any]:
        return iter(loader())

    def state_dict(self) -> Any:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to do."""


class OddStrategy(SavedStrategy):
    def state_dict(self) -> Any:
        return {"seen": {1}}


class OddOptimizer(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "seen": {1}}


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("['model']['_extra_state']", {"model": OddState}),
        ("['position']['loader']['seen']", {"train_loader": OddLoader}),
        ("['strategy']['seen']", {"strategy": OddStrategy}),
        ("['optimizer']['seen']", {"optimizer": lambda: lambda parameters: OddOptimizer(parameters, lr=0.1)}),
    ],
)
def test_what_no_checkpoint_can_hold_ends_the_run_before_its_first_batch(part: str, arguments: Any, tmp_path: Path):
    def made() -> dict[str, Any]:
        return {name: make_it() for name, make_it in arguments.items()}

    run = make(tmp_path, **made())
    with pytest.raises(CheckpointError) as caught:
        run.train()
    assert str(caught.value).startswith(f"checkpoint{part}: set: could not be loaded again")
    assert run.state.iteration == 0
    make(None, **made()).train()  # who saves nothing is not bothered
