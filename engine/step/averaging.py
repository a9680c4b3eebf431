"""An average of a model's weights over training, and the model with the averaged weights in it for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["MultiAverage", "WeightAverage", "passing_buffers"]

# moves the first tensors towards the second, in place, given how many weights have been averaged before
MultiAverage = Callable[[list[Tensor], list[Tensor], int], None]


class WeightAverage:
    """Averages of a model's parameters, on the model's device, with the buffers that the model had at the last update.

    The numbers are those of torch.optim.swa_utils.AveragedModel, except for equal averages in float64, where that class
    rounds 1 / (n + 1) to float32. A shared parameter has one average. Integer parameters are copied, as buffers are;
    buffers that the model does not save are ignored.

    Args:
        model: whose weights are averaged. An update collects the tensors of its modules again if a parameter, buffer or
            module has been replaced, or a parameter's device, dtype or shape has changed, since the last update; the
            test takes a tenth of the time of collecting.
        average: what one update computes, as torch.optim.swa_utils.get_ema_multi_avg_fn(decay) and
            get_swa_multi_avg_fn() return it; called once for each device and dtype.

    >>> from torch.optim.swa_utils import get_swa_multi_avg_fn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(model, get_swa_multi_avg_fn())
    >>> for value in (1.0, 3.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update()
    >>> with average.applied():
    ...     print(model.weight.item())
    2.0
    """

    number_averaged: int
    buffers_kept: bool

    def __init__(self, model: nn.Module, average: MultiAverage) -> None:
        self.model = model
        self.number_averaged = 0
        self.buffers_kept = False  # whether the buffers come from `keep_buffers`, not from the last update
        self._average = average
        self._weights: dict[str, Tensor] = {}  # none before the first update, so no memory until then
        self._pairs: _Pairs | None = None  # of the last update, while `_weights` holds the same tensors
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights to the average; the first are copied. Nothing here waits for the device.

        Raises:
            ConfigurationError: the model's parameters have changed since the last update.
            RuntimeError: inside `applied()`, where the model holds the average itself.
        """
        self._refuse_while_applied("update")
        if self._pairs is None or not self._pairs.are_those_of_the_model():
            self._pairs = self._pair()
        if self.number_averaged:
            for mine, theirs in self._pairs.averaged:
                self._average(mine, theirs, self.number_averaged)
        for mine, theirs in self._pairs.copied:
            torch._foreach_copy_(mine, theirs)
        self.number_averaged += 1
        self.buffers_kept = False

    def _pair(self) -> _Pairs:
        """Our tensors and the model's in pairs; missing ones are copied from the model."""
        parameters, copied = _split(self.model)
        if self.number_averaged:
            weights = {name: self._weights[name] for name in self._weights.keys() - copied.keys()}
            problems = _misfits(weights, parameters, "average")
            if problems:
                raise ConfigurationError(f"WeightAverage.update(): the model has changed: {problems}; start a new one")
            # the average follows a model that was moved
            weights = {name: weights[name].to(parameter.device) for name, parameter in parameters.items()}
        else:
            weights = {name: parameter.clone() for name, parameter in parameters.items()}
        weights.update({name: buffer.clone() for name, buffer in copied.items()})
        self._weights = weights
        return _Pairs(self.model, weights, parameters, copied)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the values of the averaged weights and buffers, in the same tensors.

        However the block ends, the model has its own values again afterwards. Inside, one more copy of the weights is
        kept (between two updates the gradients, which are as large, are usually gone). A nested block changes nothing,
        nor does one before the first update.

        Raises:
            ConfigurationError: the model's weights have changed since the last update.
        """
        if self._applied or not self.number_averaged:
            yield
            return
        self._require_fit("applied", self.model)
        own = {name: tensor.detach().clone() for name, tensor in _tensors(self.model).items()}
        self._applied = True
        try:
            _copy(self._weights, self.model)
            yield
        finally:
            self._applied = False
            _copy(own, self.model)

    def keep_buffers(self) -> None:
        """Inside `applied()`: adopt the model's buffers, such as statistics estimated again, until the next update.

        Raises:
            RuntimeError: outside of `applied()`, or before the first update.
        """
        if not self._applied:
            raise RuntimeError("WeightAverage.keep_buffers(): the model holds its own buffers; call it in applied()")
        self._weights.update({name: buffer.detach().clone() for name, buffer in _split(self.model)[1].items()})
        self._pairs = None
        self.buffers_kept = True

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averaged weights and buffers into a model of the same structure.

        Raises:
            ConfigurationError: they do not fit the model.
            RuntimeError: nothing has been averaged yet, or the model is the averaged one, inside `applied()`.
        """
        if not self.number_averaged:
            raise RuntimeError("WeightAverage.copy_to(): nothing has been averaged yet; call update() first")
        if model is self.model:
            self._refuse_while_applied("copy_to")
        self._require_fit("copy_to", model)
        _copy(self._weights, model)

    def state_dict(self) -> dict[str, Any]:
        """A copy on the host: the averaged weights and buffers by the model's names, and the number of updates.

        Raises:
            RuntimeError: inside `applied()`, where a checkpoint would save the average as the model's own weights.
        """
        self._refuse_while_applied("state_dict")
        return {
            "number_averaged": self.number_averaged,
            "buffers_kept": self.buffers_kept,
            "weights": {
                name: tensor if tensor.is_meta else tensor.to("cpu", copy=True)
                for name, tensor in self._weights.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved average, on the model's device.

        Raises:
            CheckpointError: it does not fit the model; the message lists what is missing, unexpected or different.
            RuntimeError: inside `applied()`.
        """
        self._refuse_while_applied("load_state_dict")
        number, saved = int(state["number_averaged"]), state["weights"]
        if number:
            mine = _tensors(self.model)
            problems = _misfits(saved, mine, "checkpoint")
            if problems:
                raise CheckpointError(f"the checkpoint's averaged weights do not fit the model: {problems}")
            # copies: the same state may be loaded again
            self._weights = {name: saved[name].to(tensor.device, copy=True) for name, tensor in mine.items()}
        else:
            self._weights = {}
        self._pairs = None
        self.number_averaged, self.buffers_kept = number, bool(state["buffers_kept"])

    def _require_fit(self, method: str, model: nn.Module) -> None:
        problems = _misfits(self._weights, _tensors(model), "average")
        if problems:
            raise ConfigurationError(
                f"WeightAverage.{method}(): the averaged weights do not fit the model: {problems}; "
                "use the model that was averaged, as it was then"
            )

    def _refuse_while_applied(self, method: str) -> None:
        if self._applied:
            raise RuntimeError(
                f"WeightAverage.{method}(): the model holds the averaged weights now; call it outside of applied()"
            )


class _Pairs:
    """An average's tensors and the model's in pairs, by device and dtype, as torch's foreach kernels want them.

    They are the model's own tensors: `model.half()` would not change detached ones.
    """

    def __init__(
        self, model: nn.Module, weights: Mapping[str, Tensor], parameters: dict[str, Tensor], copied: dict[str, Tensor]
    ) -> None:
        self.averaged = _grouped(weights, parameters)
        self.copied = _grouped(weights, copied)
        self._parameters = list(parameters.values())
        # the dicts in which modules keep their tensors and submodules
        self._dicts: list[dict[str, Any]] = [
            each
            for module in model.modules()
            # parameters() and the like build a generator per module, at each update
            for each in (module._parameters, module._buffers, module._modules)  # noqa: SLF001
        ]
        self._held = list(self._holding())
        self._kinds = self._kinds_now()

    def are_those_of_the_model(self) -> bool:
        held = self._held
        now = list(self._holding())
        return len(now) == len(held) and all(map(is_, now, held)) and self._kinds_now() == self._kinds

    def _holding(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._dicts))

    def _kinds_now(self) -> tuple[list[object], ...]:
        # model.to() and model.half() put new data into the same parameters
        kept = self._parameters
        return [each.device for each in kept], [each.dtype for each in kept], [each.shape for each in kept]


def _grouped(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for name, theirs in tensors.items():
        mine = weights[name]
        group = groups.setdefault((mine.device, mine.dtype), ([], []))
        group[0].append(mine)
        group[1].append(theirs)
    return list(groups.values())


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is averaged and what is copied, by name, each tensor once."""
    averaged: dict[str, Tensor] = {}
    copied: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        kind = averaged if parameter.is_floating_point() or parameter.is_complex() else copied
        kind[name] = parameter
    # the others are derived, may be large (masks, caches), and may change their shape
    passing = {name for name, _ in passing_buffers(model)}
    copied.update((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
    return averaged, copied


def passing_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are not persistent, by their paths: no state_dict holds them.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> model[0].register_buffer("mask", torch.ones(2), persistent=False)
    >>> [name for name, _ in passing_buffers(model)]
    ['0.mask']
    """
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:  # noqa: SLF001  # a state_dict may have other names
            tensor = getattr(module, name, None)
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    averaged, copied = _split(model)
    return averaged | copied


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    tensors = _tensors(model)  # looked up again: a module may have replaced a buffer
    for name, value in weights.items():
        tensors[name].copy_(value)


def _misfits(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> str:
    """Why the weights do not fit the model's tensors; "" if they do."""
    problems = [f"missing: {name} {_describe(tensors[name])}" for name in tensors.keys() - weights.keys()]
    problems += [f"unexpected: {name} {_describe(weights[name])}" for name in weights.keys() - tensors.keys()]
    for name in weights.keys() & tensors.keys():
        theirs, mine = weights[name], tensors[name]
        kind = "shape" if theirs.shape != mine.shape else "dtype"
        if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
            problems.append(f"{kind}: {name} is {_describe(theirs)} in the {where}, {_describe(mine)} in the model")
    return "; ".join(sorted(problems))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
