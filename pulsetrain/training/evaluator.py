"""The engine that runs a model over validation sets, without gradients and with the generators left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from pulsetrain.engine import Engine, EventBus
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.data.workers import workers_begin, workers_outlive_signals
from pulsetrain.engine.distributed.agreed_pass import AgreedPass
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.data_source import DataSource, IterableSource
from pulsetrain.engine.step.model_call import eval_mode

__all__ = ["Evaluator", "check_sets", "no_batch"]


class Evaluator(Engine):
    """An Engine whose runs hold a model in eval mode, and leave the generators as they were, however they end.

    What `contexts` make is entered round every run, in their order, such as `EMA(...).applied`.

    Args:
        process_function: as of Engine.
        model: that is evaluated.
        name: as of Engine.
        bus: likewise.
        control: of several processes that all have to compute as many batches.
    """

    def __init__(
        self, process_function: Any, model: nn.Module, *, name: str, bus: EventBus, control: ControlGroup | None = None
    ) -> None:
        super().__init__(process_function, name=name, bus=bus)
        self._model = model
        self.source: DataSource = _LoaderSource(control)
        self.contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self.set_name: str | None = None  # the validation set under way, where there is one

    # Round the run, not in handlers of it: a pause, terminate(skip_completed=True), a muted event and a run that fails
    # before STARTED reach no handler.
    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.around_run():
            return super().run(*args, **kwargs)

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """The state of model and generators that a run is in."""
        with eval_mode(self._model), rng.preserve_rng(), ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            yield

    def around_epoch(self, done: int) -> AbstractContextManager[object]:
        return workers_outlive_signals(self.state.dataloader)  # some loaders start theirs at the first batch

    def empty_data_error(self) -> Exception:
        return super().empty_data_error() if self.set_name is None else no_batch(self.set_name)


class _LoaderSource(IterableSource):
    """Passes whose workers do not end with a signal that ends the run at its next safe point."""

    def __init__(self, control: ControlGroup | None) -> None:
        self._control = control

    def begin(self, data: Iterable[object], iteration: int) -> Iterator[object]:
        with workers_begin(data):
            batches = iter(data)
        if self._control is None or length_of(data) is not None:
            return batches
        why = "a sharded model gathers its weights for each batch of a validation set"
        return AgreedPass(self._control, why).over(batches)


def check_sets(loaders: Mapping[str, Iterable[object]]) -> None:
    """Refuse a validation set that is known to be empty; one without a length is looked at when it is run.

    Raises:
        ConfigurationError: a set's length is 0.
    """
    for name, loader in loaders.items():
        if length_of(loader) == 0:
            raise no_batch(name, "its length is 0")


def no_batch(name: str, why: str | None = None) -> ConfigurationError:
    """The error for a validation set without a batch, and the reason if it is known."""
    return ConfigurationError(
        f"validation set {name!r}: gave no batch{f' ({why})' if why else ''}; "
        "give it data (drop_last=True drops the only batch of a small set), or leave the set out"
    )
