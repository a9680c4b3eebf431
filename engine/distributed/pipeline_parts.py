"""A model of which each process has some of the layers: its own forward runs, and skips those of other processes.

What a process does not have stays in the model by its name, on torch's meta device: with a shape, and without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.engine.distributed.pipeline_plan import PipelinePlan, Span
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["PipelineParts", "leave_out"]


class PipelineParts:
    """Lets a model compute one part of its layers.

    The module before the part returns what the part has received, and the model ends where it would call the module
    after the part, with what that would get.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    >>> whole = model(torch.ones(1, 2))
    >>> parts = PipelineParts(model, PipelinePlan((), ("0", "1"), ()))
    >>> between = parts.run(lambda: model(torch.ones(1, 2)), Span(0, 1), None)
    >>> torch.equal(parts.run(lambda: model(torch.ones(1, 2)), Span(1, 2), between), whole)
    True

    Args:
        model: the whole model, whose modules get another forward.
        plan: of the model.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        self.plan = plan
        self.now: _Run | None = None
        places = [(name, -1) for name in plan.before]
        places += [(name, at) for at, name in enumerate(plan.blocks)]
        places += [(name, len(plan.blocks)) for name in plan.after]
        for name, at in places:
            module = model.get_submodule(name)
            module.forward = _Part(self, name, at, module.forward)

    def run(self, call: Callable[[], Any], span: Span, received: Tensor | None) -> Any:
        """What the blocks of a part compute: what is passed on, in the last part the model's outputs.

        Args:
            call: calls the model, with the batch's inputs.
            span: the blocks.
            received: from the part before this one; None in the first.

        Raises:
            ConfigurationError: the model cannot be split there.
        """
        self.now = run = _Run(span, received)
        try:
            outputs = call()
        except _PartEnds:
            return run.passed
        finally:
            self.now = None
        if not run.begun or span.end < len(self.plan.blocks):
            raise _cannot(self.plan.blocks[span.end - 1], "the model's forward did not call all of its layers in order")
        return outputs


class _PartEnds(Exception):  # noqa: N818  # not an error: it ends the model's forward
    pass


class _Run:
    """One part, once."""

    span: Span
    received: Tensor | None
    filler: Tensor | None

    def __init__(self, span: Span, received: Tensor | None) -> None:
        self.span, self.received = span, received
        self.passed: Tensor | None = None
        self.begun = False  # whether the part's first block was called
        # in place of what other processes have computed: a model that uses it shows nan
        self.filler = None if received is None else torch.full_like(received, torch.nan)


class _Part:
    """The forward of a module of the plan."""

    def __init__(self, parts: PipelineParts, name: str, at: int, forward: Callable[..., Any]) -> None:
        self.parts, self.name, self.at, self.forward = parts, name, at, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.parts.now
        if run is None:
            raise RuntimeError(
                f"{self.name} is a part of a model that several processes compute one after the other; call the model "
                "as a whole, in all of them"
            )
        start, end = run.span
        if (self.at > start and not run.begun) or (self.at < start and run.begun) or self.at > end:
            raise _cannot(self.name, "the model calls it in another order than that in which it has registered it")
        if self.at == end < len(self.parts.plan.blocks):
            run.passed = self._first(args, kwargs)
            raise _PartEnds
        if self.at < start and start > 0:
            return run.received if self.at == start - 1 else run.filler
        if run.received is not None:
            self._check_received(run, args, kwargs)
        run.begun = run.begun or self.at >= start
        return self.forward(*args, **kwargs)

    def _first(self, args: Iterable[object], kwargs: dict[str, object]) -> Tensor:
        first = next(iter((*args, *kwargs.values())), None)
        if not isinstance(first, Tensor):
            raise _cannot(self.name, f"it is called with {type(first).__name__} first, and a tensor is passed on")
        return first

    def _check_received(self, run: _Run, args: Iterable[object], kwargs: dict[str, object]) -> None:
        """The part's first block alone gets what was received, once, and none gets what other processes compute."""
        given = [*args, *kwargs.values()]
        received = sum(_is_same(each, run.received) for each in given)
        if received != (self.at == run.span.start) or any(_is_same(each, run.filler) for each in given):
            raise _cannot(self.name, "it needs something else than what the layer before it has returned")


def leave_out(model: nn.Module, names: Iterable[str]) -> dict[Tensor, Tensor]:
    """Replace the tensors of these modules by ones without values; returns the parameters by those that they replace.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    >>> replaced = leave_out(model, ["0"])
    >>> model[0].weight.device, model[0].weight.shape
    (device(type='meta'), torch.Size([3, 2]))
    """
    replaced: dict[Tensor, Tensor] = {}
    for name in names:
        for module in model.get_submodule(name).modules():
            for key, each in list(module.named_parameters(recurse=False)):
                if each not in replaced:
                    replaced[each] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
                setattr(module, key, replaced[each])
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, torch.empty_like(buffer, device="meta"))
    return replaced


def _is_same(value: object, tensor: Tensor | None) -> bool:
    """Whether it is the same memory: hooks of fully_shard give a module another object."""
    return (
        isinstance(value, Tensor)
        and tensor is not None
        and value.data_ptr() == tensor.data_ptr()
        and (value.shape, value.stride()) == (tensor.shape, tensor.stride())
    )


def _cannot(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the model cannot be split at {name}: {why}; a layer may depend on the batch's inputs and on what the layer "
        "before it returns, and a tensor is all that it returns",
        "Topology",
        pipeline=...,
    )
