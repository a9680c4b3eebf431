"""A training step over the shares of virtual ranks: its result has the same bits on any number of processes.

Each share is computed by itself, with random numbers of its virtual rank, and weighted by its size over that of the
global batch. Losses and gradients are then added in one tree (engine/distributed/reduction.py), within the process and
over the processes. So a batch, its loss and its gradients are those of the global batch in every process, and callers
need not know that there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from pulsetrain.engine.backends.module_view import version_of
from pulsetrain.engine.data import rng
from pulsetrain.engine.data.virtual_loader import Shares
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.reduction import TreeSum, add_over_processes, gathered
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import AlternatingStrategy, Strategy, TrainingBatch

__all__ = ["GlobalBatch", "check_virtual_model", "prepare_shares", "reduce_shares"]

_LEARNS = (
    "would depend on which shares a process computes, since a forward pass writes into it; use a model without such "
    "buffers (LayerNorm or GroupNorm in place of BatchNorm), or leave virtual and reduction='tree' out"
)


class GlobalBatch(TrainingBatch):
    """The prepared shares of a process; samples, tokens and size are those of the global batch.

    Args:
        parts: one for each virtual rank; None where it has no sample.
        first: the virtual rank of the first.
        seed: of what the step draws.
        samples: of the global batch.
        tokens: likewise.
        size: what its loss is a mean over.
    """

    parts: Sequence[TrainingBatch | None]
    first: int
    seed: int

    def __init__(
        self,
        parts: Sequence[TrainingBatch | None],
        first: int,
        seed: int,
        *,
        samples: int,
        tokens: int,
        size: int | float | Tensor,
    ) -> None:
        super().__init__(None, None, samples, tokens, size)  # type: ignore[arg-type]  # a whole number for most losses
        self.__dict__.update(parts=parts, first=first, seed=seed)


def prepare_shares(shares: Shares, prepare: Callable[[object], TrainingBatch], device: torch.device) -> GlobalBatch:
    """Prepare each share; the processes add up their sizes.

    Args:
        shares: of this process.
        prepare: makes a batch of a share.
        device: on which the processes exchange numbers.
    """
    parts: list[TrainingBatch | None] = []
    for rank, share in enumerate(shares.batches, shares.first):
        if share is not None:
            rng.seed_step(rng.derive(shares.seed, rank))
        parts.append(None if share is None else prepare(share))
    counts = [(float(part.size), part.samples, part.tokens) if part is not None else (0.0, 0, 0) for part in parts]
    everyone = torch.cat(gathered(torch.tensor(counts, dtype=_wide(device), device=device))).tolist()
    size, samples, tokens = (sum(each) for each in zip(*everyone, strict=True))  # in the order of the virtual ranks
    whole: int | float | Tensor = int(size) if size == int(size) else size
    if not whole:  # no share counts anything, which an accumulation expects on the device
        whole = torch.zeros((), device=device)
    return GlobalBatch(parts, shares.first, shares.seed, samples=round(samples), tokens=round(tokens), size=whole)


def reduce_shares(module: nn.Module, batch: GlobalBatch, compute: Callable[[TrainingBatch, float], Tensor]) -> Tensor:
    """Add the global batch's gradients to the parameters'; returns its loss. All processes call this.

    Args:
        module: the model.
        batch: this process's shares.
        compute: adds a share's gradients, times a weight, to the parameters'; returns its loss, detached.

    Raises:
        ConfigurationError: the forward pass writes into a buffer.
    """
    learning = [each for each in module.parameters() if each.requires_grad]
    waiting = [each.grad for each in learning]
    before = _written(module)
    tree = TreeSum()
    for leaf in _leaves(learning, batch, compute):
        tree.add(leaf)
    if (after := _written(module)) != before:
        name = next(name for name in after if after[name] != before.get(name))
        raise ConfigurationError(f"buffer {name!r} {_LEARNS}", "TorchBackend", model=type(module))
    sums = tree.total()
    add_over_processes(sums)
    *gradients, head = sums
    taken_part = head[1:].tolist()
    for parameter, held, gradient, count in zip(learning, waiting, gradients, taken_part, strict=True):
        if not count:  # in no share
            parameter.grad = held
        else:
            parameter.grad = gradient if held is None else held.add_(gradient)
    rng.seed_step(rng.derive(batch.seed))  # what is drawn between two steps is the same in every process, too
    return head[0]


def _leaves(
    learning: Sequence[nn.Parameter], batch: GlobalBatch, compute: Callable[[TrainingBatch, float], Tensor]
) -> Iterator[list[Tensor]]:
    """The gradients of each share; and in one vector its part of the loss, and which parameters have a gradient.

    A parameter without a gradient counts 0, as in a virtual rank without a sample: adding 0 may change the sign of a 0.
    """
    device = next((each.device for each in learning), torch.device("cpu"))
    for rank, part in enumerate(batch.parts, batch.first):
        for each in learning:
            each.grad = None
        # a mean over nothing, if no share counts
        loss = torch.tensor(torch.nan if isinstance(batch.size, Tensor) else 0.0, dtype=_wide(device), device=device)
        if part is not None and part.size:
            rng.seed_step(rng.derive(batch.seed, rank, 1))
            weight = float(part.size) / float(batch.size)
            loss = compute(part, weight).to(_wide(device)) * weight
        taken_part = [float(each.grad is not None) for each in learning]
        head = torch.cat([loss.reshape(1), torch.tensor(taken_part, dtype=_wide(device), device=device)])
        yield [*(each.grad if each.grad is not None else torch.zeros_like(each) for each in learning), head]


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _written(module: nn.Module) -> dict[str, tuple[int, object]]:
    """Which tensor each buffer is, and how often it was written."""
    return {name: (id(each), version_of(each)) for name, each in module.named_buffers()}


def check_virtual_model(module: nn.Module, strategy: Strategy, *, compiled: bool) -> None:
    """Refuse what would not have the same bits on any number of processes, or cannot be added up.

    Raises:
        ConfigurationError: the model has running statistics, sparse gradients, or is shared out already; or it is
            compiled, or trained by a strategy with several losses.
    """
    for name, each in module.named_modules():
        if isinstance(each, _NormBase) and each.track_running_stats:
            raise ConfigurationError(
                f"a running mean of {name or 'the model'!r} {_LEARNS}",
                "TorchBackend",
                model=type(each),
            )
        if getattr(each, "sparse", False) is True:
            rule = f"{name!r} has sparse gradients, which virtual ranks cannot add up; set sparse=False"
            raise ConfigurationError(rule, "TorchBackend", model=type(each))
    refused: dict[str, object] = {}
    if is_sharded(module) or any(isinstance(each, DistributedDataParallel) for each in module.modules()):
        refused["model"] = type(module)  # it communicates by itself
    if compiled:
        refused["compile"] = True  # what is compiled depends on the shapes that a process has seen
    if isinstance(strategy, AlternatingStrategy):
        refused["strategy"] = type(strategy)
    if refused:
        raise ConfigurationError(
            "does not go with virtual ranks; give a plain model and a strategy with one loss, or leave virtual and "
            "reduction='tree' out",
            "TorchBackend",
            **refused,
        )
