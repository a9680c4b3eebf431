"""`self.log` of a LightningModule: to the trainer's log in training, to the validation's metrics in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError

__all__ = ["ModuleLog", "set_name_left_out"]

_REDUCTIONS = ("mean", "sum", "max", "min")


def set_name_left_out(name: str) -> str:
    """A metric's name without the usual start, which the validation set's name replaces.

    >>> set_name_left_out("val_loss"), set_name_left_out("val/acc"), set_name_left_out("validity")
    ('loss', 'acc', 'validity')
    """
    for start in ("val_", "val/", "test_", "test/"):
        if name.startswith(start) and name != start:
            return name[len(start) :]
    return name


class _Reduced:
    """Values of one name over an epoch or a set, with their weights."""

    def __init__(self, reduction: str) -> None:
        self.reduction, self.total, self.weight = reduction, 0.0, 0.0

    def add(self, value: Tensor, weight: float) -> None:
        number = float(value)
        if self.reduction == "mean":
            self.total += number * weight
        elif self.weight == 0.0 or self.reduction == "sum":
            self.total += number
        else:
            self.total = (max if self.reduction == "max" else min)(self.total, number)
        self.weight += weight

    def compute(self) -> float:
        return self.total / self.weight if self.reduction == "mean" else self.total


class ModuleLog:
    """Collects what a module logs.

    Args:
        report: called with the name and the value of what is logged for a step or an epoch of training.
    """

    def __init__(self, report: Callable[[str, Any, bool], None]) -> None:
        self._report = report
        self.stage = ""  # "train" in a step, "evaluate" in a set, "" elsewhere
        self.in_step = False  # whether a step calls, and not a hook
        self.batch_size = 1
        self.latest: dict[str, float] = {}  # by the module's own names
        self.of_batch: dict[str, Tensor] = {}  # what the current batch's step has logged
        self._epoch: dict[str, _Reduced] = {}  # of training
        self._set: dict[str, _Reduced] = {}  # of the evaluation
        # torchmetrics' objects; those of steps alone are not reported for the epoch
        self._metrics: dict[str, dict[str, Any]] = {"train": {}, "steps": {}, "evaluate": {}}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *,
        batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """What the module's `log` does; `prog_bar` and arguments about several processes have no effect."""
        if not isinstance(name, str):
            raise ArgumentTypeError("needs a name as text", "LightningModule.log", name=name)
        reduction = getattr(reduce_fx, "__name__", reduce_fx)
        if reduction not in _REDUCTIONS:
            rule = f"choose one of {', '.join(_REDUCTIONS)}, or log a torchmetrics metric"
            raise ConfigurationError(rule, "LightningModule.log", reduce_fx=reduce_fx)
        if isinstance(value, Mapping):
            rule = "needs one number, or a torchmetrics metric; call log_dict for several"
            raise ArgumentTypeError(rule, "LightningModule.log", value=type(value))
        training = self.stage != "evaluate"
        on_step = (training and self.in_step) if on_step is None else on_step
        on_epoch = not (training and self.in_step) if on_epoch is None else on_epoch
        of_epoch = f"{name}_epoch" if on_step else name
        if is_metric := _is_metric(value):
            kind = "evaluate" if not training else "train" if on_epoch else "steps"
            self._metrics[kind][of_epoch if training and on_epoch else name] = value
            # the batch's value, which calling the metric has returned; update() has none
            value = getattr(value, "_forward_cache", None) if on_step and training else None
        if value is None:
            return
        scalar = _scalar(name, value)
        weight = float(self.batch_size if batch_size is None else batch_size)
        self.of_batch[name] = scalar
        if not training:
            self._set.setdefault(name, _Reduced(str(reduction))).add(scalar, weight)
            return
        if on_step:
            self._report(f"{name}_step" if on_epoch else name, scalar, logger is not False)
        if on_epoch and not is_metric:
            self._epoch.setdefault(of_epoch, _Reduced(str(reduction))).add(scalar, weight)

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        """`log` for each name."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)

    def end_epoch(self) -> None:
        """Report what was logged for the epoch."""
        found = {name: each.compute() for name, each in self._epoch.items()} | _computed(self._metrics["train"])
        self._epoch.clear()
        _reset(self._metrics["steps"])
        for name, value in found.items():
            self._report(name, value, True)
            self.latest[name] = value
            if name.endswith("_epoch"):
                self.latest[name.removesuffix("_epoch")] = value

    def begin_set(self) -> None:
        """An evaluation starts."""
        self._set.clear()

    def end_set(self) -> dict[str, float]:
        """What the evaluation has logged, by names without "val_"."""
        found = {name: each.compute() for name, each in self._set.items()} | _computed(self._metrics["evaluate"])
        self._set.clear()
        self.latest.update(found)
        return {set_name_left_out(name): value for name, value in found.items()}

    def state_dict(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The epoch's values so far, and the paths of the metrics that were logged for it.

        Args:
            metrics: those of the module by path.
        """
        paths = {id(metric): path for path, metric in metrics.items()}
        logged, by_step = (
            {name: paths.get(id(metric), "") for name, metric in self._metrics[kind].items()}
            for kind in ("train", "steps")
        )
        values = {name: [each.reduction, each.total, each.weight] for name, each in self._epoch.items()}
        return {"values": values, "metrics": logged, "steps": by_step, "latest": dict(self.latest)}

    def load_state_dict(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Continue with the saved values."""
        self._epoch.clear()
        for name, (reduction, total, weight) in state["values"].items():
            self._epoch[name] = _Reduced(reduction)
            self._epoch[name].total, self._epoch[name].weight = total, weight
        for kind, logged in (("train", state["metrics"]), ("steps", state.get("steps", {}))):
            self._metrics[kind] = {name: metrics[path] for name, path in logged.items() if path in metrics}
        self.latest.clear()
        self.latest.update(state["latest"])


def _is_metric(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("compute", "reset", "update"))


def _computed(metrics: dict[str, Any]) -> dict[str, float]:
    """The values of metrics, each of which starts again, though it may be logged under several names."""
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    _reset(metrics)
    return found


def _reset(metrics: dict[str, Any]) -> None:
    for metric in metrics.values():
        metric.reset()
    metrics.clear()


def _scalar(name: str, value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    if tensor.numel() != 1:
        rule = f"{name!r} needs one number, not a tensor of shape {tuple(tensor.shape)}"
        raise ConfigurationError(rule, "LightningModule.log")
    return tensor.reshape(())
