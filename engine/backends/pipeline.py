"""Steps of a model whose layers several processes have: torch's pipeline schedules over micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from pulsetrain.engine.backends.micro_batches import MicroBatches, joined, split, tensors_in
from pulsetrain.engine.backends.pipeline_step import PipelineStep, arguments_of
from pulsetrain.engine.backends.torch_computation import no_gradient
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.pipeline_parts import PipelineParts, leave_out
from pulsetrain.engine.distributed.pipeline_plan import check_parts, find_plan
from pulsetrain.engine.distributed.ranks import PIPELINE
from pulsetrain.engine.distributed.shards import norms_of_wholes, shard_weights
from pulsetrain.engine.distributed.shared_batches import check_batches
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import TrainingStrategy, Tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from pulsetrain.engine.distributed.pipeline_plan import Span

__all__ = ["Pipeline", "pipeline_of"]

T = TypeVar("T")
_KEPT = 8  # schedules, each for batches of one shape


class Pipeline:
    """Computes with one model, of which this process has some of the layers; all processes call the same methods.

    The model itself stays as it is, with all its names. It can be called as a whole, without gradients, by all
    processes together: each gets the outputs.

    Args:
        module: the whole model, on any device. All processes begin with the values of rank 0.
        topology: the schedule, and the number of parts.
        device: on which the layers of this process are from now on.
        context: around each forward pass and loss, as autocast.

    Raises:
        ConfigurationError: the model has no plan, or cannot be split by it.
    """

    module: Module
    topology: Topology
    device: torch.device
    group: ProcessGroup
    copies: ProcessGroup | None

    def __init__(
        self,
        module: nn.Module,
        topology: Topology,
        device: torch.device,
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.module, self.topology, self.device, self._context = module, topology, device, context
        plan = find_plan(module, topology.blocks)
        self.spans: list[Span] = plan.spans(topology.parts_of_layers, topology.pipeline)
        parts = {name: part for part, span in enumerate(self.spans) for name in plan.names(span)}
        check_parts(module, parts, topology.pipeline)
        mesh = topology.mesh(device)
        self.group = mesh["pipeline"].get_group()
        names = [name for name in mesh.mesh_dim_names or () if name != "pipeline"]
        is_sharded = mesh["shard"].size() > 1
        self.copies = mesh["replicate"].get_group() if "replicate" in names and not is_sharded else None
        self._shards = mesh["shard"].get_group() if is_sharded else None
        self._same_part = [mesh[name].get_group() for name in reversed(names) if mesh[name].size() > 1]
        self.place: int = mesh.get_local_rank("pipeline")
        absent = [name for name, part in parts.items() if part % topology.pipeline != self.place]
        _place_values(module, absent, device)
        self.replaced: Mapping[Tensor, Tensor] = leave_out(module, absent)
        if is_sharded:
            own = [module.get_submodule(name) for name in parts if name not in absent]
            self.replaced = {**self.replaced, **_shard(own, mesh[tuple(names)], topology, device)}
        self._parts = PipelineParts(module, plan)
        module.forward = _Whole(self, module.forward)
        setattr(module, PIPELINE, self)
        self._programs: dict[object, _Program] = {}
        self._now: PipelineStep | None = None

    def __deepcopy__(self, memo: object) -> Pipeline:
        return self  # it has process groups

    def train(self, batch: MicroBatches, strategy: TrainingStrategy, scale: float | Tensor) -> Tensor:
        """Add `scale` times the gradients of the batch's loss to the parameters'; returns the loss in all processes."""
        if self.place:  # else the layers of two processes would draw the same numbers
            rng.seed_step(rng.derive(torch.initial_seed(), self.place))
        step = PipelineStep([arguments_of(each.inputs) for each in batch.batches], self._count)
        step.learn(batch, strategy, scale)
        self._run(step)
        self._average_gradients()
        return self._from_last(torch.stack(step.losses).sum().double() if step.losses else None)

    def outputs(self, *args: Any, **kwargs: Any) -> Tree:
        """The model's outputs, in all processes."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the model is computed by several processes one after the other: its outputs have no gradient; call "
                "it under torch.no_grad()"
            )
        parts = split((args, kwargs), self._count)
        step = PipelineStep(parts, self._count)
        self._run(step)
        found = [step.outputs_of(at) for at in range(len(parts))] if step.outputs else []
        alone = [each for each in tensors_in(found[0]) if not each.ndim] if found else []
        if alone:
            raise ConfigurationError(
                "the model returns a tensor of shape (), which has no rows, so its outputs for the parts of a batch "
                "cannot be put together; return one row for each of the batch",
                "Topology",
                pipeline=self.topology.pipeline,
            )
        return self._share(joined(found) if found else None)

    def norm(self, own: Tensor) -> Tensor:
        """The norm over the parameters of all processes, from that over this one's: the same bits in all of them."""
        return norms_of_wholes(own.to(self.device).reshape(1), 2.0, [self.group])[0]

    def merged(self, values: dict[str, T]) -> dict[str, T]:
        """The values by name of all processes of the pipeline, in the order of their parts; they can be pickled."""
        found: list[Any] = [None] * self.topology.pipeline
        torch.distributed.all_gather_object(found, values, group=self.group)
        return {name: value for each in found for name, value in each.items()}

    def broadcast_buffers(self) -> None:
        """Give the buffers of this process's layers the values that they have in the first copy of the model."""
        for group in self._same_part:
            for each in self._own_buffers():
                torch.distributed.broadcast(each, group=group, group_src=0)

    def compute(self, part: int, index: int, received: Tensor | None) -> Any:
        """What a part makes of a micro-batch: what it passes on, or the model's outputs."""
        assert self._now is not None
        args, kwargs = self._now.inputs[index]
        with self._context():
            found = self._parts.run(lambda: self.module(*args, **kwargs), self.spans[part], received)
        if part < len(self.spans) - 1:
            return found
        self._now.outputs[index] = found
        return torch.zeros(())  # the outputs may be of any kind

    def loss(self, _: Tensor, number: Tensor) -> Tensor:
        """What a micro-batch adds to the loss, in the process with the last part."""
        assert self._now is not None
        with self._context():
            loss = self._now.loss(int(number))
        if not loss.requires_grad:
            raise no_gradient()
        return loss

    @property
    def is_running(self) -> bool:
        """Whether a part is being computed, so that a call of the model is one of its own."""
        return self._parts.now is not None

    @property
    def _count(self) -> int:
        return self.topology.parts_of_batch

    def _run(self, step: PipelineStep) -> None:
        self._now = step
        try:
            key = step.kind()
            program = self._programs.pop(key, None)
            if self._is_new(program is None):
                check_batches(step.inputs[0], self.group, "pipeline")
                program = _Program(self, step.learns)
            assert program is not None
            self._programs[key] = program
            while len(self._programs) > _KEPT:
                del self._programs[next(iter(self._programs))]
            program.run()
        finally:
            self._now = None

    def _is_new(self, new: bool) -> bool:
        """Whether a program has to be made: also if those that have the same layers in shards have to make one."""
        if self._shards is None:
            return new
        found = torch.tensor([float(new)], device=self.device)  # a new one computes the layers once more
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._shards)
        return bool(found.item())

    def interfaces(self) -> list[Tensor]:
        """A tensor without values like what each part but the last passes on of a micro-batch.

        This process computes its parts once, without any effect on the model's buffers and the generators.
        """
        found: list[Tensor] = []
        buffers = [(each, each.clone()) for each in self._own_buffers()]
        with torch.no_grad(), rng.preserve_rng():
            for part in range(len(self.spans) - 1):
                place = part % self.topology.pipeline
                said: list[Any] = [None]
                if place == self.place:
                    before = torch.zeros_like(found[-1], device=self.device) if found else None
                    passed = self.compute(part, 0, before)
                    said = [(passed.shape, passed.stride(), passed.dtype)]
                torch.distributed.broadcast_object_list(said, group=self.group, group_src=place)
                shape, stride, dtype = said[0]
                found.append(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            for each, before in buffers:
                each.copy_(before)
        return found

    def _own_buffers(self) -> list[Tensor]:
        return [each for each in self.module.buffers() if not each.is_meta]

    def _average_gradients(self) -> None:
        """Over the copies of the model; gradients that waited are the same in all of them, and stay as they are."""
        if self.copies is None:
            return
        own = {name: each for name, each in self.module.named_parameters() if each.requires_grad and not each.is_meta}
        idle = [name for name, each in own.items() if each.grad is None]
        if idle:
            raise ConfigurationError(
                f"{idle[0]} took no part in the loss, so that its gradient cannot be averaged over the copies of the "
                "model; call requires_grad_(False) on it, or let the model use it in each step",
                "Topology",
                pipeline=self.topology.pipeline,
            )
        gradients = [each.grad for each in own.values() if each.grad is not None]
        works = [torch.distributed.all_reduce(each, group=self.copies, async_op=True) for each in gradients]
        for work in works:
            work.wait()
        if gradients:
            torch._foreach_div_(gradients, torch.distributed.get_world_size(self.copies))

    @property
    def _last(self) -> int:
        return self.topology.pipeline - 1

    def _from_last(self, value: Tensor | None) -> Tensor:
        shared = torch.zeros((), dtype=torch.float64, device=self.device) if value is None else value
        torch.distributed.broadcast(shared, group=self.group, group_src=self._last)
        return shared

    def _share(self, outputs: Tree) -> Tree:
        """The outputs of the last process, in all."""
        like = [tree_map_only(Tensor, lambda each: _Like(each.shape, each.dtype), outputs)]
        torch.distributed.broadcast_object_list(like, group=self.group, group_src=self._last)
        if self.place != self._last:
            outputs = tree_map_only(
                _Like, lambda each: torch.empty(each.shape, dtype=each.dtype, device=self.device), like[0]
            )
        for each in tensors_in(outputs):
            torch.distributed.broadcast(each.contiguous(), group=self.group, group_src=self._last)
        return outputs


class _Like:
    """The shape and the dtype of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class _Stage(nn.Module):
    """A part as torch's schedules call it; the model is not registered in it."""

    def __init__(self, compute: Callable[[int, Tensor | None], Any]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        passed: Tensor = self._compute(int(index), received[0] if received else None)
        return passed


class _Program:
    """A schedule for micro-batches of one shape."""

    def __init__(self, pipeline: Pipeline, learns: bool) -> None:
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        topology, ends = pipeline.topology, [*pipeline.interfaces(), torch.empty((), device="meta")]
        for each in ends:
            each.requires_grad_(learns)
        stages: list[Any] = [
            PipelineStage(
                _Stage(partial(pipeline.compute, part)), part, topology.parts_of_layers, pipeline.device,
                input_args=(ends[part - 1],) if part else (), output_args=ends[part], group=pipeline.group,
            )
            for part in range(pipeline.place, topology.parts_of_layers, topology.pipeline)
        ]  # fmt: skip
        self._count, self._learns = topology.parts_of_batch, learns
        options: dict[str, Any] = {"loss_fn": pipeline.loss if learns else None, "scale_grads": False}
        self._schedule: Any
        if topology.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(stages, self._count, **options)
        else:
            kind = ScheduleGPipe if topology.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(stages[0], self._count, **options)

    def run(self) -> None:
        numbers = torch.arange(self._count)  # the micro-batches: torch's schedules split tensors alone
        try:
            self._schedule.step(target=numbers if self._learns else None, index=numbers, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception) and "failed to run" in str(error).lower():
                raise error.__cause__ from None  # what the model has raised
            raise


class _Whole:
    """The model's forward, for a call of the model as a whole and for one of a part."""

    def __init__(self, pipeline: Pipeline, forward: Callable[..., Any]) -> None:
        self.pipeline, self.forward = pipeline, forward
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.forward if self.pipeline.is_running else self.pipeline.outputs
        return run(*args, **kwargs)


def pipeline_of(model: object) -> Pipeline | None:
    """The pipeline that computes the model, if one does."""
    return getattr(model, PIPELINE, None)


def _place_values(module: nn.Module, absent: Sequence[str], device: torch.device) -> None:
    """Move all but the absent modules to the device, with the values of rank 0; one tensor at a time is sent there."""
    left_out = {each for name in absent for each in _tensors(module.get_submodule(name))}
    with torch.no_grad():
        for each in _tensors(module):
            value = each.detach().to(device)
            torch.distributed.broadcast(value, src=0)
            if each not in left_out:
                each.data = value


def _shard(
    modules: Sequence[nn.Module], mesh: DeviceMesh, topology: Topology, device: torch.device
) -> dict[Tensor, Tensor]:
    """Split each module's weights over the processes that have them; returns the shards by the whole parameters."""
    replaced: dict[Tensor, Tensor] = {}
    for module in modules:
        whole = dict(module.named_parameters(remove_duplicate=False))
        if not whole:
            continue
        if any(each in replaced for each in whole.values()):
            raise ConfigurationError(
                "two layers of the model share a parameter, which cannot be split up in both; set shard=1",
                "Topology",
                shard=topology.shard,
                pipeline=topology.pipeline,
            )
        shard_weights(module, mesh, topology, device)
        shards = dict(module.named_parameters(remove_duplicate=False))
        replaced.update((each, shards[name]) for name, each in whole.items())
    return replaced


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
