"""How long a run is: its bound, in iterations and in updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Backend, ConfigurationError, State, TrainingStrategy
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import can_be_read_once, length_of
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import gives_all_ranks_the_same
from pulsetrain.engine.errors import refused
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.training.no_data import NoTrainingData

if TYPE_CHECKING:
    from pulsetrain.engine.step.accumulation import Accumulate

__all__ = ["RunLength"]

_MEASURED = 8  # batches, for the average number of tokens

_OTHER_BOUNDS = "bound it by max_iterations, max_updates or max_epochs"

_UNBOUNDED = 1 << 60  # iterations; for runs that something else ends


class RunLength:
    """The length that a configuration gives a run; `max_epochs=1` if it sets no bound.

    >>> from pulsetrain.config import TrainingConfig
    >>> length = RunLength(TrainingConfig(max_epochs=3, accumulate=2), loader=range(10))
    >>> length.total_iterations, length.total_updates
    (30, 15)

    Args:
        config: the settings.
        loader: the training data.
        optimizers: how many there are; each is assumed to make one update for a batch, or for those accumulated.
    """

    accumulate: Accumulate
    has_data: bool

    def __init__(self, config: TrainingConfig, loader: Iterable[Any], optimizers: int = 1) -> None:
        self.config = config
        self._optimizers = optimizers
        self.accumulate = rule = config.accumulation
        self.counts_updates: bool = config.max_updates is not None and (rule.tokens is not None or optimizers > 1)
        self.counted: bool = config.max_tokens is not None or self.counts_updates  # see reached()
        self.epoch_length = length_of(loader)
        self.has_data = not isinstance(loader, NoTrainingData)
        self._loader: Any = loader
        self._tokens_a_batch: float | None = None
        self._earlier = 0  # how many more batches the earlier part of the run took than it would with this `accumulate`

    @property
    def max_epochs(self) -> int | None:
        """The bound in epochs, or None if another bound is set."""
        config = self.config
        others = (config.max_iterations, config.max_updates, config.max_tokens, config.max_environment_steps)
        return config.max_epochs or (1 if all(other is None for other in others) else None)

    @property
    def max_iterations(self) -> int | None:
        """The bound in batches, if the loop can count it itself; None if it counts epochs."""
        if self.max_epochs is not None:
            return None
        if self.config.max_updates is not None and not self.counts_updates:
            batches = self.accumulate.batches_in(self.config.max_updates)
            return None if batches is None else batches + self._earlier
        return self.config.max_iterations or _UNBOUNDED

    @property
    def total_iterations(self) -> int | None:
        """How many batches the run takes in all; None if that is not known."""
        if self.max_epochs is not None:
            return None if self.epoch_length is None else self.max_epochs * self.epoch_length
        if self.counts_updates:
            assert self.config.max_updates is not None
            updates = math.ceil(self.config.max_updates / self._optimizers)
            return self.accumulate.batches_in(updates, self._tokens_a_batch)
        if self.config.max_environment_steps is not None:
            rollouts = math.ceil(self.config.max_environment_steps / self._loader.steps_per_rollout)
            return None if self.epoch_length is None else rollouts * self.epoch_length
        if self.config.max_tokens is None:
            return self.max_iterations
        return math.ceil(self.config.max_tokens / self._tokens_a_batch) if self._tokens_a_batch else None

    @property
    def total_updates(self) -> int | None:
        """How many steps each optimizer takes; None if that is not known."""
        if self.config.max_updates is not None and self.max_epochs is None:
            return self.config.max_updates // self._optimizers
        iterations = self.total_iterations
        return None if iterations is None else self.accumulate.updates_in(iterations, self._tokens_a_batch)

    def start_from(self, iteration: int, update: int, waiting: int) -> None:
        """Count the updates that are left from here: the batches so far may have made theirs with another `accumulate`.

        Args:
            iteration: the last one.
            update: likewise.
            waiting: how many batches wait for the next update.
        """
        self._earlier = 0
        now, after = self.accumulate.batches_in(update), self.accumulate.batches_in(update + 1)
        if now is not None and after is not None and not now <= iteration < after:
            self._earlier = iteration + max(1, after - now - waiting) - after

    def reached(self, state: State) -> str | None:
        """Why the run ends here, for bounds that depend on what the batches hold; None if it does not.

        Raises:
            ConfigurationError: the run has a bound in tokens, and the strategy counts none.
        """
        config, tokens = self.config, getattr(state, "tokens", 0)
        if config.max_tokens is not None and state.iteration and not tokens:
            rule = f"the strategy counts no tokens, so the run would not end; {_OTHER_BOUNDS}"
            raise refused(config, rule, "max_tokens")
        if config.max_tokens is not None and tokens >= config.max_tokens:
            return f"max_tokens={config.max_tokens} was reached"
        steps = config.max_environment_steps
        if steps is not None and self._loader.environment_steps >= steps:
            return f"max_environment_steps={steps} was reached"
        if self.counts_updates and config.max_updates is not None and state.update >= config.max_updates:
            return f"max_updates={config.max_updates} was reached"
        return None

    def reached_inside(self, state: State, epoch_done: bool) -> str | None:
        """The reason that the loop gives for ending at the bound; None at the end of an epoch."""
        inside = state.max_iters is not None and not epoch_done
        return self.reached(state) or (f"{self.describe_bound(state)} was reached" if inside else None)

    def describe_bound(self, state: State) -> str:
        """The setting that makes the run end at `state.max_iters`, with its value."""
        config = self.config
        if config.max_updates is not None and state.max_iters == self.max_iterations:
            return f"max_updates={config.max_updates}"
        name = "max_iterations" if state.max_iters == config.max_iterations else "max_iters"
        return f"{name}={state.max_iters}"

    def check(self) -> None:
        """Refuse a run that could not learn.

        Raises:
            ConfigurationError: it would end before its first update, or needs to read an iterator twice.
        """
        config = self.config
        if config.max_environment_steps is not None and not hasattr(self._loader, "environment_steps"):
            kind = type(self._loader).__name__
            rule = f"needs EnvironmentRollouts as the train_loader, and this is {kind}; {_OTHER_BOUNDS}"
            raise refused(config, rule, "max_environment_steps")
        total = self.total_iterations if self.has_data else None
        if self.epoch_length == 0:
            raise ConfigurationError(
                "has no batches; a DataLoader with drop_last drops a short one", "Trainer", train_loader=...
            )
        if self.accumulate.tokens is None and self.total_updates == 0:
            rule = f"the run has {total} batches, which make no update; accumulate fewer, or train longer"
            raise refused(config, rule, "accumulate")
        if self.max_epochs is not None and self.max_epochs > 1 and can_be_read_once(self._loader):
            rule = (
                "the loader is an iterator, which can be read only once; "
                "give a DataLoader or a list, or bound the run by max_iterations"
            )
            raise refused(config, rule, "max_epochs")

    @contextmanager
    def over(self, loader: Iterable[Any]) -> Iterator[int | None]:
        """Become the length of a run over other data, unless the block raises; gives the total updates before that."""
        before, total = dict(vars(self)), self.total_updates
        self._loader, self.epoch_length, self._tokens_a_batch = loader, length_of(loader), None
        self.has_data = not isinstance(loader, NoTrainingData)
        try:
            yield total
        except BaseException:
            vars(self).update(before)
            raise

    def measure(self, strategy: TrainingStrategy, backend: Backend, control: ControlGroup) -> None:
        """Count the tokens of the first batches, if the length depends on them; the generators stay as they were.

        Of several processes, all have to call this: their batches count together, and so they all have one length.

        Raises:
            ConfigurationError: the strategy counts no tokens, or there is no batch.
        """
        if self.config.max_tokens is not None:
            setting, remedy = "max_tokens", _OTHER_BOUNDS
        elif self.accumulate.tokens is not None:
            setting, remedy = "accumulate", "accumulate batches"
        else:
            return
        if self._tokens_a_batch is not None or not self.has_data:
            return
        if any(control.gather(can_be_read_once(self._loader) or getattr(self._loader, "fires_rollouts", False))):
            return  # its first batch cannot be read beforehand, so the length of the run is not known
        with rng.preserve_rng():
            batches = [backend.prepare_batch(batch, FirstBatch(strategy)) for batch in islice(self._loader, _MEASURED)]
        counts = control.gather([batch.tokens for batch in batches])
        if not all(counts):
            raise ConfigurationError("gave no batch; it is empty", "Trainer", train_loader=...)
        here = backend.data_rank
        leads = control.gather(here.leads)
        counts = [each for each, counted in zip(counts, leads, strict=True) if counted]
        if gives_all_ranks_the_same(self._loader, here.count):
            counts = counts[:1]  # each process has counted the global batch
        tokens = [sum(each) for each in zip(*counts, strict=False)]
        if not all(map(all, counts)):
            raise refused(self.config, f"{type(strategy).__name__} counts no tokens; {remedy}", setting)
        self._tokens_a_batch = sum(tokens) / len(tokens)
        if max(tokens) > 1.1 * min(tokens) and self.config.max_updates is None:
            get_logger("pulsetrain").info(
                "batches differ in tokens: the number of updates, over which a schedule decays, is an estimate; "
                "set max_updates to fix it",
                updates=self.total_updates,
                tokens_a_batch=f"{min(tokens)} to {max(tokens)}",
            )
