"""Norms and histograms of the gradients of each parameter or module."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Every
from pulsetrain.engine.argument_checks import check_bool, check_choice, check_type, check_whole_number
from pulsetrain.engine.backends.module_view import reading_once
from pulsetrain.engine.backends.pipeline import Pipeline, pipeline_of
from pulsetrain.engine.distributed.shards import holders_of, local, norms_of_wholes
from pulsetrain.engine.errors import refused
from pulsetrain.engine.optimizers import NamedOptimizers
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import attribute, reject_replay
from pulsetrain.handlers.attachment.publishing import publish, publish_media

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["GradientMonitor"]

ROOT = "(root)"  # the model itself, which may have parameters of its own
_Groups = tuple[torch.distributed.ProcessGroup, ...]


class GradientMonitor(Handler):
    """Publishes the norm of each gradient before clipping, as "grad_norm/layer.weight".

    Norms are computed on the device, only at the cadence, and copied to the host at once; the trainer computes a
    gradient norm for this handler only at these updates. A histogram temporarily takes about 30 bytes for each value of
    the gradient, one gradient at a time.

    With several optimizers, the updates of each are counted separately, from where the run starts or resumes, and the
    parameters of each are measured; the trainer then computes a gradient norm at every update.

    Args:
        every: a cadence of updates: gradients are complete only at an update.
        by: "parameter", or "module" for the norm over all parameters of a module, without those of modules inside it;
            parameters of the model itself are "(root)".
        histograms: also fire MEDIA_LOGGED with a histogram "grad/layer.weight" of the finite values.
        bins: number of bins of a histogram, of equal width from the smallest value to the largest.
        norm_type: 1, 2 or inf.
        updates: also publish "update_ratio/layer.weight": the norm of the update over the norm of the weights before
            it. At the cadence, this takes as much memory as the weights.
        top: publish only this many norms, the largest ones.
        model: by default the engine's.

    Raises:
        ConfigurationError: a value is out of range, or the cadence is not one of updates.
        TypeError: the model is not an nn.Module.

    >>> import pulsetrain
    >>> from pulsetrain.engine import SupervisedStrategy
    >>> trainer = pulsetrain.Trainer(
    ...     nn.Linear(2, 1, bias=False), [(torch.ones(1, 2), torch.ones(1, 1))], strategy=SupervisedStrategy("mse"),
    ...     handlers=[GradientMonitor(Every(updates=1))])
    >>> subscription = trainer.on(Events.METRICS_LOGGED)(lambda engine, event: print(*event.payload.metrics))
    >>> history = trainer.train()
    grad_norm/weight
    train/loss learning_rate grad_norm samples_per_second
    """

    every: Every
    histograms: bool
    bins: int
    norm_type: float | int
    updates: bool
    top: int | None
    model: Module | None

    def __init__(
        self,
        every: Every | None = None,
        *,
        by: Literal["parameter", "module"] = "parameter",
        histograms: bool = False,
        bins: int = 64,
        norm_type: float = 2,
        updates: bool = False,
        top: int | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.every = every = Every(updates=50) if every is None else every
        if not isinstance(every, Every) or every != Every(updates=every.updates or 1):
            raise refused(self, "gradients are complete only at an update; use Every(updates=50)", "every")
        check_choice("GradientMonitor", "by", by, ("parameter", "module"))
        if isinstance(norm_type, bool) or norm_type not in (1, 2, math.inf):
            raise ConfigurationError("needs 1, 2 or inf", "GradientMonitor", norm_type=norm_type)
        check_bool("GradientMonitor", "histograms", histograms)
        check_bool("GradientMonitor", "updates", updates)
        check_whole_number("GradientMonitor", "bins", bins)
        check_whole_number("GradientMonitor", "top", top, or_none=True)
        check_type("GradientMonitor", "model", model, nn.Module | None, "a torch.nn.Module")
        self.by, self.histograms, self.bins = by, histograms, bins
        self.norm_type, self.updates, self.top, self.model = norm_type, updates, top, model
        self._before: dict[str, list[tuple[Tensor, Tensor]]] | None = None  # parameters, and copies before the update
        self._norms: dict[str, float] = {}  # published with the ratios, after the update
        self._counts: dict[str, int] = {}  # updates of each of several optimizers
        self._holders: dict[str, list[_Groups]] = {}  # of each tensor's parts, where several processes share the model
        self._pipeline: Pipeline | None = None  # those of which each has some layers

    def attach(self, engine: Engine) -> Self:
        """Measure this engine's gradients, in phase OBSERVE of GRADIENTS_READY.

        Raises:
            ConfigurationError: the engine has no model, and none was given.
            RecordingError: the engine is a replay.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("GradientMonitor", engine, "gradients")
            if self.model is None and attribute(engine, "model", nn.Module) is None:
                raise refused(self, f"{engine.name!r} has no torch model; pass model=", "model")
            interval = self.every.updates
            optimizers = attribute(engine, "optimizer", NamedOptimizers)
            if optimizers is not None and len(optimizers.parts) > 1:  # state.update counts the updates of all
                subscribe(Events.STARTED, self._on_started, on_error="warn")
                subscribe(Events.GRADIENTS_READY, self._on_gradients_of, on_error="warn")
                interval = 1
            else:
                subscribe(Events.GRADIENTS_READY(every=interval), self._on_gradients, on_error="warn")
            if self.updates:
                subscribe(Events.OPTIMIZER_STEP_COMPLETED(every=interval), self._on_update, on_error="warn")
        return self

    def detach(self) -> None:
        super().detach()
        self._before, self._norms = None, {}
        self._counts.clear()

    def _on_started(self) -> None:
        self._counts.clear()

    def _on_gradients_of(self, engine: Engine, event: Event) -> None:
        optimizers, name = attribute(engine, "optimizer", NamedOptimizers), event.payload.optimizer
        self._counts[name] = count = self._counts.get(name, 0) + 1
        assert self.every.updates is not None
        assert optimizers is not None
        if count % self.every.updates == 0:
            owned = {id(each) for group in optimizers.parts[name].param_groups for each in group["params"]}
            self._on_gradients(engine, owned)

    @torch.no_grad()
    def _on_gradients(self, engine: Engine, owned: set[int] | None = None) -> None:
        self._before, self._norms = None, {}  # left by an update that failed
        model = self.model if self.model is not None else attribute(engine, "model", nn.Module)
        groups = self._groups(model, owned) if model is not None else {}
        self._pipeline = pipeline_of(model)
        if not groups and self._pipeline is None:
            return
        gradients = {name: [local(_values(parameter.grad)) for parameter in each] for name, each in groups.items()}
        self._holders = {name: [holders_of(parameter) for parameter in each] for name, each in groups.items()}
        found: dict[str, list[Tensor]] = {name: [norm] for name, norm in self._norms_of(gradients).items()}
        if self.histograms:
            for name, parts in gradients.items():
                found[name].append(_histogram(parts, self.bins))
        host = _to_host(found)
        norms = self._of_all({name: values[0] for name, values in host.items()})
        chosen = _largest(norms, self.top)
        norms = {name: value for name, value in norms.items() if name in chosen}
        for name in norms if self.histograms else ():
            least, greatest, *counts = host[name][1:]
            publish_media(engine, f"grad/{name}", "histogram", _counted(counts, least, greatest))
        if self.updates:
            self._norms = norms
            held = {name: [local(each.detach()) for each in groups[name]] for name in norms if name in groups}
            self._before = {name: [(each, each.clone()) for each in parts] for name, parts in held.items()}
        else:
            publish(engine, {f"grad_norm/{name}": value for name, value in norms.items()})

    @torch.no_grad()
    def _on_update(self, engine: Engine) -> None:
        before, self._before = self._before, None
        norms, self._norms = self._norms, {}
        if before is None:
            return
        was = self._norms_of({name: [old for _, old in each] for name, each in before.items()})
        for each in before.values():
            for parameter, old in each:
                torch.sub(parameter, old, out=old)
        added = self._norms_of({name: [old for _, old in each] for name, each in before.items()})
        host = _to_host({name: [added[name], was[name]] for name in before})
        metrics = {f"grad_norm/{name}": value for name, value in norms.items()}
        # of a size of 0 the ratio is undefined
        ratios = {f"update_ratio/{name}": change / size for name, (change, size) in host.items() if size > 0.0}
        publish(engine, metrics | self._of_all(ratios))

    def _of_all(self, values: dict[str, float]) -> dict[str, float]:
        """Those of all layers, where several processes have some of them each."""
        return values if self._pipeline is None else self._pipeline.merged(values)

    def _groups(self, model: nn.Module, owned: set[int] | None) -> dict[str, list[nn.Parameter]]:
        """The parameters with a gradient, by the names under which they are published; only those with these ids."""
        groups: dict[str, list[nn.Parameter]] = {}
        with nullcontext() if self.updates else reading_once(model):  # the weights themselves count with updates
            named = list(model.named_parameters())
        for name, parameter in named:
            if parameter.grad is not None and parameter.numel() and (owned is None or id(parameter) in owned):
                # parameters of a functional model have paths such as "block/0/kernel"
                module = name[: max(name.rfind("."), name.rfind("/"), 0)]
                key = name if self.by == "parameter" else module or ROOT
                groups.setdefault(key, []).append(parameter)
        return groups

    def _norms_of(self, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """The norm over each group's tensors, shape (), on their device; half precision is computed in float32."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        norm_of: dict[int, Tensor] = {}  # by the tensor's id
        for tensor in chain.from_iterable(tensors.values()):
            if not tensor.numel():  # of a shard
                norm_of[id(tensor)] = tensor.new_zeros(())
                continue
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (_, kind), alike in kinds.items():
            dtype = torch.float32 if kind.itemsize < 4 else None
            # one kernel for all tensors, where a norm for each would be one launch per parameter;
            # what torch.nn.utils.get_total_norm calls, and has no public name
            norms = torch._foreach_norm(alike, self.norm_type, dtype=dtype)
            norm_of.update(zip(map(id, alike), norms, strict=True))
        self._complete(tensors, norm_of)
        joined: dict[str, Tensor] = {}
        for name, parts in tensors.items():
            own = [norm_of[id(part)] for part in parts]
            if len(own) > 1:
                own = [torch.linalg.vector_norm(torch.stack([part.to(own[0]) for part in own]), self.norm_type)]
            joined[name] = own[0]
        return joined

    def _complete(self, tensors: dict[str, list[Tensor]], norm_of: dict[int, Tensor]) -> None:
        """Replace the norms of parts by those of the whole tensors; all processes that hold some call this."""
        split: dict[_Groups, list[Tensor]] = {}
        for name, parts in tensors.items():
            for part, groups in zip(parts, self._holders[name], strict=True):
                if groups:
                    split.setdefault(groups, []).append(part)
        for groups, parts in split.items():
            wholes = norms_of_wholes(torch.stack([norm_of[id(part)] for part in parts]), self.norm_type, groups)
            norm_of.update(zip(map(id, parts), wholes, strict=True))


def _values(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _histogram(parts: list[Tensor], bins: int) -> Tensor:
    """The smallest finite value, the largest, and the count of each bin: shape (2 + bins,)."""
    device = parts[0].device
    exact = _widest(device)  # float32 counts up to 2**24
    flat = [part.reshape(-1).to(device) for part in parts]
    finite = [part.isfinite() for part in flat]
    least = torch.stack([part.where(ok, math.inf).min().to(exact) for part, ok in zip(flat, finite, strict=True)]).min()
    greatest = torch.stack(
        [part.where(ok, -math.inf).max().to(exact) for part, ok in zip(flat, finite, strict=True)]
    ).max()
    width = (greatest - least) / bins
    counts = torch.zeros(bins, dtype=torch.int64, device=device)
    for part, ok in zip(flat, finite, strict=True):
        bin_of = (part.to(exact) - least).div_(width).nan_to_num_(0.0).clamp_(0, bins - 1)
        counts.scatter_add_(0, bin_of.long(), ok.long())
    return torch.cat([torch.stack([least, greatest]), counts.to(exact)])


def _counted(counts: list[float], least: float, greatest: float) -> tuple[list[int], list[float]]:
    """Counts and edges, of which there is one more. If all values are equal the range is 1 wide, as in numpy."""
    if not least <= greatest:  # no value was finite
        least = greatest = 0.0
    if least == greatest:
        total = sum(counts)
        counts = [0.0] * len(counts)
        counts[len(counts) // 2] = total
        least, greatest = least - 0.5, greatest + 0.5
    return [int(count) for count in counts], np.linspace(least, greatest, len(counts) + 1).tolist()


def _to_host(found: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """The values of each name's tensors, concatenated; one copy per device."""
    rows = {
        name: torch.cat([part.reshape(-1).to(_widest(part.device)) for part in parts]) for name, parts in found.items()
    }
    host: dict[str, list[float]] = {}
    for device in dict.fromkeys(row.device for row in rows.values()):
        here = {name: row for name, row in rows.items() if row.device == device}
        values = iter(torch.cat(list(here.values())).tolist())
        host |= {name: list(islice(values, row.numel())) for name, row in here.items()}
    return host


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _largest(norms: dict[str, float], top: int | None) -> set[str]:
    """The names of the largest norms; NaN counts as the largest, so that it is always shown."""
    order = sorted(norms, key=lambda name: math.inf if math.isnan(norms[name]) else norms[name], reverse=True)
    return set(order[:top])
