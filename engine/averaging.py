"""An average of a model's weights over training, and the model with the averaged weights in it for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError, ConfigurationError

__all__ = ["MultiAverage", "WeightAverage"]

# moves the first tensors towards the second, in place, given how many weights have been averaged before
MultiAverage = Callable[[list[Tensor], list[Tensor], int], None]


class WeightAverage:
    """Averages of a model's parameters, on the model's device, with the buffers that the model had at the last one.

    The numbers are those of torch.optim.swa_utils.AveragedModel, but for equal averages in float64, where that one
    rounds 1 / (n + 1) to float32. A parameter has one average, under however many names the model shares it.
    Parameters of whole numbers are copied as buffers are; buffers that the model does not save are left alone.

    Args:
        model: whose weights are averaged; read again at each update.
        average: what one update computes, as torch.optim.swa_utils.get_ema_multi_avg_fn(decay) and
            get_swa_multi_avg_fn() return it; called once for each device and dtype.
    """

    def __init__(self, model: nn.Module, average: MultiAverage) -> None:
        self.model = model
        self.number_averaged = 0
        self.buffers_kept = False  # whether the buffers are those of `keep_buffers`, not the last update's
        self._average = average
        self._weights: dict[str, Tensor] = {}  # none before the first update, so that they cost nothing until then
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Average the model's weights in: the first are copied. Nothing here waits for the device.

        Raises:
            ConfigurationError: the model's parameters are others than at the update before.
            RuntimeError: inside `applied()`, where the model's weights are the average itself.
        """
        self._refuse_while_applied("update")
        parameters, copied = _split(self.model)
        if self.number_averaged:
            averaged = {name: self._weights[name] for name in self._weights.keys() - copied.keys()}
            problems = _misfits(averaged, parameters, "average")
            if problems:
                raise ConfigurationError(f"WeightAverage.update(): the model has changed: {problems}; average it anew")
            groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
            for name, parameter in parameters.items():
                # a model that was moved takes its average along
                mine = self._weights[name] = self._weights[name].to(parameter.device)
                group = groups.setdefault((mine.device, mine.dtype), ([], []))
                group[0].append(mine)
                group[1].append(parameter)
            for group in groups.values():
                self._average(*group, self.number_averaged)
        else:
            self._weights = {name: parameter.clone() for name, parameter in parameters.items()}
        self._weights.update({name: buffer.clone() for name, buffer in copied.items()})
        self.number_averaged += 1
        self.buffers_kept = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights and buffers, by their values: its tensors stay the ones they were.

        Afterwards, however the block ends, it holds what it held before. Inside, one more copy of the weights is kept
        (between two updates the gradients, which are as large, are usually gone). A block inside another one changes
        nothing, nor does one before the first update.

        Raises:
            ConfigurationError: the model's weights are others than at the last update.
        """
        if self._applied or not self.number_averaged:
            yield
            return
        self._require_fit("applied", self.model)
        held = {name: tensor.clone() for name, tensor in _tensors(self.model).items()}
        self._applied = True
        try:
            _copy(self._weights, self.model)
            yield
        finally:
            self._applied = False
            _copy(held, self.model)

    def keep_buffers(self) -> None:
        """Inside `applied()`: take over the model's buffers, statistics estimated anew, until the next update.

        Raises:
            RuntimeError: outside of it, or before the first update.
        """
        if not self._applied:
            raise RuntimeError("WeightAverage.keep_buffers(): the model holds its own buffers; call it in applied()")
        self._weights.update({name: buffer.clone() for name, buffer in _split(self.model)[1].items()})
        self.buffers_kept = True

    def copy_to(self, model: nn.Module) -> None:
        """Put the averaged weights and buffers into a model of the same kind, for good.

        Raises:
            ConfigurationError: they do not fit it.
            RuntimeError: nothing has been averaged yet; or it is the averaged model, inside `applied()`.
        """
        if not self.number_averaged:
            raise RuntimeError("WeightAverage.copy_to(): nothing has been averaged yet; call update() first")
        if model is self.model:
            self._refuse_while_applied("copy_to")
        self._require_fit("copy_to", model)
        _copy(self._weights, model)

    def state_dict(self) -> dict[str, Any]:
        """A copy on the host: the averaged weights and buffers by the model's names for them, and their number.

        Raises:
            RuntimeError: inside `applied()`, where a checkpoint would take the average for the model's own weights.
        """
        self._refuse_while_applied("state_dict")
        return {
            "number_averaged": self.number_averaged,
            "buffers_kept": self.buffers_kept,
            "weights": {name: tensor.to("cpu", copy=True) for name, tensor in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved average, on the model's device.

        Raises:
            CheckpointError: it does not fit the model; the message lists what is missing, unexpected or other.
            RuntimeError: inside `applied()`.
        """
        self._refuse_while_applied("load_state_dict")
        number, saved = int(state["number_averaged"]), state["weights"]
        if number:
            mine = _tensors(self.model)
            problems = _misfits(saved, mine, "checkpoint")
            if problems:
                raise CheckpointError(f"the checkpoint's averaged weights do not fit the model: {problems}")
            # copies: whoever holds the state may load it once more
            self._weights = {name: saved[name].to(tensor.device, copy=True) for name, tensor in mine.items()}
        else:
            self._weights = {}
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


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is averaged and what is copied, by name, each tensor once and detached."""
    averaged: dict[str, Tensor] = {}
    copied: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        kind = averaged if parameter.is_floating_point() or parameter.is_complex() else copied
        kind[name] = parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # the others are derived, may be large (masks, caches), and may change their shape as they please
            if name not in module._non_persistent_buffers_set:
                copied[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return averaged, copied


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    averaged, copied = _split(model)
    return averaged | copied


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    tensors = _tensors(model)  # looked up anew: a module may have put another buffer in a buffer's place
    for name, value in weights.items():
        tensors[name].copy_(value)


def _misfits(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> str:
    """What keeps the weights from standing for the model's tensors; "" where nothing does."""
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
