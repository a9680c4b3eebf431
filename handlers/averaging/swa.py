"""Averages the weights that late training passes through (stochastic weight averaging)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from pulsetrain.engine.backends.module_view import ArraysView
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.keyed_loader import length_of
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.averaging import WeightAverage
from pulsetrain.handlers.averaging.averaging import Averaging

__all__ = ["SWA"]


class SWA:
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at each occasion from a start on.

    The numbers are those of torch.optim.swa_utils.AveragedModel with get_swa_multi_avg_fn(). No running statistics of
    batch normalisation were ever measured under the averaged weights: `bn_loader` gives the batches to measure them,
    a whole pass by torch.optim.swa_utils.update_bn, as soon as they are needed and once for each average.

    A checkpoint holds the raw weights as the model's, and the average in this handler's state.

    Args:
        after_epoch: average from the next epoch on; 0 is from the first. Either this or after_update.
        after_update: average from the next update on.
        every: when to average; by default at each epoch's end.
        bn_loader: gives tensors, or tuples that begin with one, as often as asked; usually the training set.
        model: by default the engine's.
        validate: let the engine's evaluator, where it has one, run the model with the averaged weights.

    Raises:
        ConfigurationError: not exactly one start, one that is no whole number of at least 0, or a bn_loader that is
            empty, an iterator, or a collection of loaders.
        TypeError: the model is no nn.Module, the cadence no Every, or bn_loader no iterable.
    """

    def __init__(
        self,
        *,
        after_epoch: int | None = None,
        after_update: int | None = None,
        every: Every | None = None,
        bn_loader: Iterable[Any] | None = None,
        model: nn.Module | None = None,
        validate: bool = True,
    ) -> None:
        if (after_epoch is None) == (after_update is None):
            raise ConfigurationError(
                f"SWA({after_epoch=}, {after_update=}): needs exactly one of the two, such as after_epoch=10"
            )
        for argument, start in (("after_epoch", after_epoch), ("after_update", after_update)):
            if start is not None and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
                raise ConfigurationError(f"SWA({argument}={start!r}): needs a whole number of at least 0")
        if bn_loader is not None and not isinstance(bn_loader, Iterable):
            raise TypeError(f"SWA(bn_loader={bn_loader!r}): needs an iterable of batches, such as a DataLoader")
        if isinstance(bn_loader, Iterator):
            raise ConfigurationError(
                f"SWA(bn_loader={type(bn_loader).__name__}): is an iterator, which can be run over once; "
                "pass what gives its batches again, such as a DataLoader or a list"
            )
        if isinstance(bn_loader, (tuple, list)) and any(isinstance(each, DataLoader) for each in bn_loader):
            raise ConfigurationError(
                f"SWA(bn_loader={type(bn_loader).__name__}): holds DataLoaders where batches are needed; "
                "pass one of them, usually that of the training set"
            )
        if bn_loader is not None and length_of(bn_loader) == 0:
            raise _no_batch()
        self.after_epoch, self.after_update = after_epoch, after_update
        self.bn_loader = bn_loader
        self.validate = validate
        every = Every(epochs=1) if every is None else every
        self._averaging = Averaging("SWA", get_swa_multi_avg_fn(), model, every)

    def attach(self, engine: Engine) -> Self:
        """Average at the cadence, in phase COMPUTE, before a validation that is due at the same point.

        Raises:
            ConfigurationError: no model was given and the engine has none; it needs a bn_loader, or one of its own;
                or validation runs on another average of these weights already, that of a schedule-free optimizer, say.
        """
        self._averaging.attach(
            engine, applied=self.applied if self.validate else None, check=self._check, begun=self._has_begun
        )
        return self

    def detach(self) -> None:
        """Average no more; the average stays."""
        self._averaging.detach()

    @property
    def number_averaged(self) -> int:
        """How many weights the mean is over."""
        return self._averaging.weights("number_averaged").number_averaged

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights, for a `with` block; before the first occasion with its own.

        Where its batch normalisation has not been measured under this average yet, it is now; random numbers that
        the pass draws leave no trace.

        Raises:
            ConfigurationError: bn_loader is needed and missing, or gave no batch.
            TypeError: bn_loader gave what is no tensor.
        """
        average = self._averaging.weights("applied")
        with average.applied():
            if average.number_averaged and not average.buffers_kept and (norms := _batch_norms(average.model)):
                self._measure(average, norms)
            yield

    def copy_to(self, model: nn.Module) -> None:
        """Put the averaged weights and the statistics measured under them into a model of the same kind, for good.

        Raises:
            ConfigurationError: they do not fit it; or as `applied`.
            RuntimeError: nothing has been averaged yet.
            TypeError: as `applied`.
        """
        with self.applied():
            pass  # measures
        self._averaging.weights("copy_to").copy_to(model)

    def state_dict(self) -> dict[str, Any]:
        return self._averaging.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved average.

        Raises:
            CheckpointError: it does not fit the model.
        """
        self._averaging.load_state_dict(state)

    def _has_begun(self, engine: Engine) -> bool:
        if self.after_epoch is not None:
            return bool(engine.state.epoch > self.after_epoch)
        return bool(engine.state.update > self.after_update)

    def _check(self, engine: Any, model: nn.Module) -> None:
        if _batch_norms(model) and self.bn_loader is None:
            raise _loader_missing()
        if isinstance(model, ArraysView) and any(each.is_floating_point() for each in model.buffers()):
            get_logger("handlers").warning(
                "SWA: the averaged weights are evaluated with the running statistics of the last update; they are not "
                "measured anew on a backend whose model is no torch module",
                backend=type(engine.backend).__name__,
            )
        shared = self.bn_loader is not None and getattr(engine, "train_loader", None) is self.bn_loader
        if shared and getattr(self.bn_loader, "persistent_workers", False):
            # it has one iterator: a second pass would put an end to the one that trains
            raise ConfigurationError(
                "SWA(bn_loader=...): with persistent_workers=True the training loader cannot give two passes at once; "
                "pass another DataLoader over the same set"
            )

    def _measure(self, average: WeightAverage, norms: list[_BatchNorm]) -> None:
        """Estimate the statistics anew, by the mean over the batches of the loader, and keep them."""
        if self.bn_loader is None:
            raise _loader_missing()
        with rng.kept(), _left_as_it_was(average.model, norms), _order_kept(self.bn_loader):
            device = norms[0].running_mean.device  # type: ignore[union-attr]  # it has one, or would not be here
            update_bn(_inputs(self.bn_loader), average.model, device=device)
        average.keep_buffers()


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The modules whose statistics `update_bn` estimates."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)]


def _inputs(loader: Iterable[Any]) -> Iterator[Tensor]:
    empty = True
    for batch in loader:
        inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"SWA(bn_loader=...): gave {type(inputs).__name__} for the model's input; needs batches that are "
                "tensors, or tuples that begin with one"
            )
        empty = False
        yield inputs
    if empty:
        raise _no_batch()


@contextmanager
def _left_as_it_was(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Each module in the mode, and with the momentum, that it had: update_bn knows one mode, and no failure."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(norm, norm.momentum) for norm in norms]
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum
        for module, training in modes:  # by train(), which a module may override to do more, from the outside in
            if module.training != training:
                module.train(training)
        for module, training in modes:
            module.training = training


@contextmanager
def _order_kept(loader: Any) -> Iterator[None]:
    """The generators of the loader's own as they were: it may be the one that trains, in the middle of a pass."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    states = [(each, each.get_state()) for each in generators if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _loader_missing() -> ConfigurationError:
    return ConfigurationError(
        "SWA(bn_loader=None): the model's batch normalisation has running statistics, which were not measured under "
        "averaged weights; pass bn_loader=, such as a DataLoader over the training set"
    )


def _no_batch() -> ConfigurationError:
    return ConfigurationError(
        "SWA(bn_loader=...): gave no batch; pass what gives some each time it is run over, such as a DataLoader"
    )
