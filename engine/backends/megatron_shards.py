"""A Megatron model whose parameters say which part of a whole they are, and its logits, split by tokens.

Megatron computes with plain tensors, of which each process holds its part. Here they become DTensors: then the norm of
gradients, optimizers, averages, digests and checkpoints know the whole, as they do of torch's own parallelism.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pulsetrain.engine.arrays import on_host
from pulsetrain.engine.data.sequences import IGNORED
from pulsetrain.engine.distributed.shards import local
from pulsetrain.engine.distributed.topology import TENSOR
from pulsetrain.engine.losses.checks import check_labels, reject

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["COPIES", "MegatronModel", "SplitLogits", "show_wholes"]

COPIES = "replicate"  # the dimension of a mesh over which there are copies of the model


class MegatronModel(nn.Module):
    """Megatron's GPTModel with the interface of a language model: tokens, and perhaps their positions, to logits.

    Args:
        gpt: Megatron's model.
        description: what it was built from, which has `vocab_size` and `context`.
        mesh: whose TENSOR are the processes that hold it together; None for one.
        splits_sequences: whether each of them computes a part of the positions between the layers.
    """

    gpt: Module
    config: Any
    mesh: DeviceMesh | None
    splits_sequences: bool

    def __init__(
        self, gpt: nn.Module, description: Any, mesh: DeviceMesh | None, *, splits_sequences: bool = False
    ) -> None:
        super().__init__()
        self.gpt, self.config, self.mesh, self.splits_sequences = gpt, description, mesh, splits_sequences
        self.context: int = description.context
        self.register_state_dict_post_hook(_without_extra_state)  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor | SplitLogits:
        """The logits, shape (batch, length, vocabulary).

        Args:
            input_ids: shape (batch, length).
            position_ids: where several documents share a row: they restart at 0 with each, and none sees another.
        """
        if self.mesh is not None and on_host(input_ids):  # of a token that it does not know, the embedding gives zeros
            wrong, last = (input_ids < 0) | (input_ids >= self.config.vocab_size), self.config.vocab_size - 1
            remedy = "outside; use the model's own tokenizer"
            reject("MegatronGPT", "input_ids", input_ids, wrong, f"needs tokens from 0 to {last}", remedy)
        self._check_length(input_ids)
        visible: Tensor | None = None
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            document = (position_ids == 0).cumsum(1)
            visible = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        logits: Tensor = self.gpt(input_ids, position_ids, visible)
        return logits if self.mesh is None else SplitLogits(logits, self.mesh[TENSOR])

    def _check_length(self, input_ids: Tensor) -> None:
        parts = self.mesh[TENSOR].size() if self.mesh is not None and self.splits_sequences else 1
        if input_ids.shape[1] % parts:
            raise ValueError(
                f"MegatronGPT: {input_ids.shape[1]} positions cannot be split over {parts} processes; choose another "
                "length of the rows, or leave sequence_parallel out"
            )


class SplitLogits:
    """Logits of which each process has those of its part of the vocabulary.

    Args:
        part: shape (..., tokens of this process).
        mesh: of the processes that hold the others.
    """

    part: Tensor

    def __init__(self, part: Tensor, mesh: DeviceMesh) -> None:
        self.part, self._mesh = part, mesh
        self._whole: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Those of all tokens, shape (..., vocabulary), gathered when this is first read, by all processes alike."""
        if self._whole is None:
            from torch.distributed.tensor import DTensor, Shard

            self._whole = DTensor.from_local(self.part, self._mesh, [Shard(-1)], run_check=False).full_tensor()
        return self._whole

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole logits."""
        return (*self.part.shape[:-1], self.part.shape[-1] * self._mesh.size())

    def token_losses(self, targets: Tensor) -> Tensor:
        """The cross entropy of each target in nats, in float32, without gathering the logits.

        Raises:
            ValueError: on the CPU: a target is not a token.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if parallel_state.get_tensor_model_parallel_world_size() != self._mesh.size():  # it asks for them, too
            raise RuntimeError(
                "Megatron's groups of processes have been made again for a model with another `tensor`; train each in "
                "processes of its own"
            )
        if on_host(targets):
            check_labels("cross_entropy", self, targets, IGNORED)
        # it writes the softmax into what it is given
        copy = self.part.clone() if self.part.dtype is torch.float32 else self.part.float()
        losses: Tensor = vocab_parallel_cross_entropy(copy, targets)
        return losses


def show_wholes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each parameter a DTensor, of which Megatron's modules read this process's part, in place.

    Its gradients are averaged over the copies of the model.

    Args:
        model: Megatron's.
        mesh: of all processes, with the dimensions COPIES and TENSOR.
    """
    for module in model.modules():
        parameters = list(module.named_parameters(recurse=False))
        for name, parameter in parameters:
            module.register_parameter(name, _whole(parameter, mesh))
        if parameters:
            summed = tuple(name for name, each in parameters if getattr(each, "sequence_parallel", False))
            kind: Any = type(module)
            module.__class__ = _reading_parts(kind, tuple(name for name, _ in parameters), summed, mesh)


def _whole(parameter: Any, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Placement = Replicate()
    held, shape = parameter.detach(), list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        split, layers = parameter.partition_dim, parameter.partition_stride  # both layers of SwiGLU are one weight
        placement = Shard(split) if layers == 1 else _StridedShard(split, split_factor=layers)
        shape[split] *= mesh[TENSOR].size()
    whole = torch.empty(shape, device="meta")
    made = DTensor.from_local(
        held, mesh, [Replicate(), placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


@cache
def _reading_parts(kind: Any, names: tuple[str, ...], summed: tuple[str, ...], mesh: DeviceMesh) -> type:
    """The class with a property for each parameter, which gives what this process computes with.

    Args:
        summed: those of whose gradient each process of a copy computes a summand: it sees a part of each row.
        mesh: over whose TENSOR these are added up, and over whose COPIES all gradients are averaged.
    """
    copies = mesh[COPIES].size()

    def reader(name: str) -> property:
        def read(module: nn.Module) -> Tensor:
            parameter: Tensor = nn.Module.__getattr__(module, name)  # type: ignore[assignment]  # the registered one
            held = local(parameter)
            if name in summed and held.requires_grad:
                held.register_hook(lambda gradient: _added(gradient, mesh[TENSOR]))
            if copies > 1 and held.requires_grad:
                held.register_hook(lambda gradient: _added(gradient, mesh[COPIES]).div_(copies))
            return held

        return property(read)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: reader(name) for name in names}})


def _added(gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    total = gradient.clone()  # others may have the same gradient
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return total


def _without_extra_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Leave out the empty entries that Megatron's layers keep for Transformer Engine."""
    for name in [each for each in state if each.endswith("_extra_state") and state[each] is None]:
        del state[name]
