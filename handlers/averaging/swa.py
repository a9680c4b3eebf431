"""Averages the weights of late training (stochastic weight averaging)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_swa_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from pulsetrain.engine import ArgumentTypeError, ConfigurationError, Engine, Every, is_training_run
from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.backends.module_view import ArraysView
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.averaging import WeightAverage
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.handlers.averaging.averaging import Averaging

__all__ = ["SWA"]


class SWA(Averaging):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights at a cadence, after a given start.

    The numbers are those of torch.optim.swa_utils.AveragedModel with get_swa_multi_avg_fn(). Training never measures
    the running statistics of batch normalisation with the averaged weights. torch.optim.swa_utils.update_bn measures
    them in a whole pass over `bn_loader`, when they are first needed and once for each average.

    A checkpoint holds the raw weights as the model's, and the average in this handler's state.

    Args:
        after_epoch: average from the next epoch on; 0 means from the first. Pass either this or after_update.
        after_update: average from the next update on.
        every: when to average; by default at the end of each epoch.
        bn_loader: gives tensors, or tuples that begin with one, in any number of passes; usually the training set.
        model: by default the engine's.
        validate: let the engine's evaluator, if it has one, run the model with the averaged weights.

    Raises:
        ConfigurationError: not exactly one start, one that is not a whole number of at least 0, or a bn_loader that is
            empty, an iterator, or a collection of loaders.
        TypeError: the model is not an nn.Module, the cadence not an Every, or bn_loader not an iterable.

    >>> from pulsetrain.engine import Engine
    >>> model = nn.Linear(1, 1, bias=False)
    >>> swa = SWA(after_epoch=1, model=model)
    >>> engine = Engine(lambda engine, batch: nn.init.constant_(model.weight, engine.state.epoch))
    >>> _ = swa.attach(engine)
    >>> _ = engine.run([0], max_epochs=3)
    >>> with swa.applied():
    ...     print(model.weight.item())  # of epochs 2 and 3
    2.5
    """

    after_epoch: int | None
    after_update: int | None

    def __init__(
        self,
        *,
        after_epoch: int | None = None,
        after_update: int | None = None,
        every: Every | None = None,
        bn_loader: Iterable[object] | None = None,
        model: nn.Module | None = None,
        validate: bool = True,
    ) -> None:
        if (after_epoch is None) == (after_update is None):
            rule = "needs exactly one of the two, such as after_epoch=10"
            raise ConfigurationError(rule, "SWA", after_epoch=after_epoch, after_update=after_update)
        for argument, start in (("after_epoch", after_epoch), ("after_update", after_update)):
            check_whole_number("SWA", argument, start, at_least=0, or_none=True)
        check_type("SWA", "bn_loader", bn_loader, Iterable | None, "an iterable of batches, such as a DataLoader")
        if isinstance(bn_loader, Iterator):
            rule = (
                "is an iterator, which gives its batches once; "
                "pass a DataLoader, a list or another iterable that gives them again"
            )
            raise ConfigurationError(rule, "SWA", bn_loader=type(bn_loader))
        if isinstance(bn_loader, (tuple, list)) and any(isinstance(each, DataLoader) for each in bn_loader):
            rule = "holds DataLoaders where batches are needed; pass one of them, usually that of the training set"
            raise ConfigurationError(rule, "SWA", bn_loader=type(bn_loader))
        if bn_loader is not None and length_of(bn_loader) == 0:
            raise _no_batch(bn_loader)
        self.after_epoch, self.after_update = after_epoch, after_update
        self.bn_loader = bn_loader
        super().__init__(get_swa_multi_avg_fn(), model, Every(epochs=1) if every is None else every, validate)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In a `with` block, the model has the averaged weights; before the first average it keeps its own.

        If the statistics of batch normalisation have not been measured with this average yet, they are measured now;
        the pass over bn_loader does not change the random number generators.

        Raises:
            ConfigurationError: bn_loader is needed and missing, or gave no batch.
            TypeError: bn_loader gave something that is not a tensor.
        """
        average = self._average_for("applied")
        with average.applied():
            if self._must_measure():
                self._measure(average, _batch_norms(average.model))
            yield

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averaged weights, and the statistics measured with them, into a model of the same kind.

        Raises:
            ConfigurationError: they do not fit it; or as `applied`.
            RuntimeError: nothing has been averaged yet.
            TypeError: as `applied`.
        """
        with self.applied():
            pass  # measures
        super().copy_to(model)

    def _has_begun(self, engine: Engine) -> bool:
        if self.after_epoch is not None:
            return engine.state.epoch > self.after_epoch
        return self.after_update is not None and engine.state.update > self.after_update

    def _must_measure(self) -> bool:
        average = self._weights
        if average is None or not average.number_averaged or average.buffers_kept:
            return False
        return bool(_batch_norms(average.model))

    def _check_model(self, engine: Engine, model: nn.Module) -> None:
        if _batch_norms(model):
            self._loader()
        if isinstance(model, ArraysView) and any(each.is_floating_point() for each in model.buffers()):
            get_logger("handlers").warning(
                "SWA: the averaged weights are evaluated with the running statistics of the last update; they are not "
                "measured again on a backend whose model is not a torch module",
                backend=type(engine.backend).__name__ if is_training_run(engine) else None,
            )
        shared = self.bn_loader is not None and is_training_run(engine) and engine.train_loader is self.bn_loader
        if shared and isinstance(self.bn_loader, DataLoader) and self.bn_loader.persistent_workers:
            # it has one iterator: a second pass would end the one that trains
            rule = (
                "with persistent_workers=True the training loader cannot give two passes at once; "
                "pass another DataLoader over the same set"
            )
            raise ConfigurationError(rule, "SWA", bn_loader=DataLoader)

    def _measure(self, average: WeightAverage, norms: list[_BatchNorm]) -> None:
        """Measure the statistics, as the mean over the batches of the loader, and keep them."""
        loader = self._loader()
        # eval_mode restores the modes: update_bn, which needs others, restores one for all
        with rng.preserve_rng(), eval_mode(average.model), _momenta_restored(norms), _order_restored(loader):
            device = norms[0].running_mean.device  # type: ignore[union-attr]  # it has one, or would not be here
            update_bn(_inputs(loader), average.model, device=device)
        average.keep_buffers()

    def _loader(self) -> Iterable[object]:
        if self.bn_loader is None:
            rule = (
                "the model's batch normalisation has running statistics, which were not measured with "
                "the averaged weights; pass bn_loader=, such as a DataLoader over the training set"
            )
            raise ConfigurationError(rule, "SWA", bn_loader=None)
        return self.bn_loader


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The modules whose statistics `update_bn` estimates."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and isinstance(m.running_mean, Tensor)]


def _inputs(loader: Iterable[object]) -> Iterator[Tensor]:
    empty = True
    for batch in loader:
        inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
        if not isinstance(inputs, Tensor):
            rule = (
                f"gave {type(inputs).__name__} for the model's input; "
                "needs batches that are tensors, or tuples that begin with one"
            )
            raise ArgumentTypeError(rule, "SWA", bn_loader=type(loader))
        empty = False
        yield inputs
    if empty:
        raise _no_batch(loader)


@contextmanager
def _momenta_restored(norms: list[_BatchNorm]) -> Iterator[None]:
    """Restore each module's momentum: update_bn does not after an error."""
    momenta = [(norm, norm.momentum) for norm in norms]
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum


@contextmanager
def _order_restored(loader: Iterable[object]) -> Iterator[None]:
    """Restore the loader's own generators: it may be the training loader, in the middle of a pass."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    generators = [getattr(holder, "generator", None) for holder in holders]
    states = [(each, each.get_state()) for each in generators if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _no_batch(loader: object) -> ConfigurationError:
    rule = "gave no batch; pass an iterable that gives batches in each pass, such as a DataLoader"
    return ConfigurationError(rule, "SWA", bn_loader=type(loader))
