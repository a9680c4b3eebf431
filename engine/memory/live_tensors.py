"""Counts the bytes of the tensors that are alive while a model trains, by component, phase and module.

It follows storages: a storage counts from the operation that makes it until it is freed. So views, writes in place,
shared weights, copies by autocast and recomputed activations count as they are. It works alike for tensors with values
and for fake ones. What a kernel allocates and frees itself is not seen; for fake tensors, what is known of it is added.

torch.distributed._tools.mem_tracker.MemTracker does something similar, but it patches UntypedStorage.resize_ and hooks
every module and optimizer of the process, visits all modules at each operation, refuses a second iteration, does not
say which module made what is kept for the backward pass, and leaves tensors such as positions without values, which
makes Hugging Face's models compute otherwise.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pulsetrain.engine.memory.kernels import PRODUCTS, UNKNOWN, blas_workspace, workspace
from pulsetrain.engine.memory.optimizer_state import state_in_memory
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.step.protocols import TrainingBatch, Tree

__all__ = ["COMPONENTS", "LOSS", "PHASES", "LiveTensors", "tensors_in"]

COMPONENTS = (
    "parameters",
    "buffers",
    "strategy",
    "batch",
    "optimizer",
    "gradients",
    "activations",
    "temporary",
    "kernels",
)
PHASES = ("forward", "backward", "update")
LOSS = "loss"  # in place of a module's name: what is computed outside of the model
_MOST_VALUES = 2**20  # of a tensor that is computed although the model is not
_CUDA_BLOCK = 512  # bytes, to a multiple of which CUDA's allocator rounds up


class _Block:
    """A storage that is alive."""

    __slots__ = ("component", "made", "module", "ref", "size")

    def __init__(self, size: int, component: str, module: str, made: int, ref: object) -> None:
        self.size, self.component, self.module, self.made, self.ref = size, component, module, made, ref


class LiveTensors(TorchDispatchMode):
    """Counts from `watching` on.

    Args:
        device: tensors on other kinds of device do not count.
        mode: in which the model computes without values.

    >>> model = nn.Linear(256, 4, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> live = LiveTensors(torch.device("cpu"))
    >>> with live.watching(model, optimizer):
    ...     loss = model(torch.ones(8, 256)).sum()
    ...     loss.backward()
    >>> live.peaks["forward"]["parameters"], live.peaks["backward"]["gradients"]
    (4096, 4096)
    """

    phase: str
    device: torch.device

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, mode: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._mode = device, mode
        self.only_fake = False  # whether tensors with values do not count
        self.phase = PHASES[0]
        self.peaks: dict[str, dict[str, int]] = {}  # by phase, at the peak of each: bytes by component
        self.saved: dict[str, int] = {}  # what the last forward pass left for the backward pass: bytes by module
        self.unknown: set[str] = set()  # operations without values whose outputs have another size than with them
        self.assumed: int = 0  # how often the value of a tensor without values was asked for
        self.total: int = 0
        self._bytes = dict.fromkeys(COMPONENTS, 0)
        self._totals: dict[str, int] = {}  # of peaks
        self._reached: dict[str, int] = {}  # the operation of each peak
        self._operations = 0
        self._blocks: dict[int, _Block] = {}  # by the id of a storage, which stays the same while it is alive
        self._modules: list[str] = []  # that compute now, innermost last
        self._multiplying: set[bool] = set()  # whether a thread that has multiplied matrices is the backward pass's
        self._blas = blas_workspace(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else 0

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each component now."""
        return dict(self._bytes)

    @contextmanager
    def watching(self, model: nn.Module, optimizer: Optimizer, strategy: object = None) -> Iterator[None]:
        """Count the tensors that the block makes with the model, its optimizer and the strategy."""
        self.mark_state(model, optimizer, strategy)
        hooks: list[Any] = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._entering(name)))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooks.append(
                    parameter.register_post_accumulate_grad_hook(lambda each: self.mark(each.grad, "gradients"))
                )
        for part in parts_of(optimizer).values():
            hooks.append(part.register_step_post_hook(lambda part, *_: self._mark_optimizer(part)))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._blocks.clear()  # with their weak references: nothing is counted from now on

    def begin_batch(self) -> None:
        """The next forward pass begins."""
        self.phase = PHASES[0]

    def mark(self, value: Tree, component: str) -> None:
        """Count the tensors in a value as this component from now on."""
        for tensor in tensors_in(value):
            storage = self._storage(tensor)
            if storage is None:
                continue
            block = self._blocks.get(id(storage)) or self._add(storage, component)
            if block.component != component:
                self._bytes[block.component] -= block.size
                self._bytes[component] += block.size
                if block.made < self._reached.get(self.phase, 0):  # it was there at the peak
                    self.peaks[self.phase][block.component] -= block.size
                    self.peaks[self.phase][component] += block.size
                block.component = component

    def mark_state(self, model: nn.Module, optimizer: Optimizer, strategy: object = None) -> None:
        """Count a model, its gradients, its optimizer, and what the strategy holds, such as a reference model."""
        for parameter in model.parameters():
            self.mark(parameter, "parameters")
            self.mark(parameter.grad, "gradients")
        self.mark(list(model.buffers()), "buffers")
        for module in model.modules():
            self.mark([each for each in vars(module).values() if isinstance(each, Tensor)], "buffers")  # not registered
        self.mark(list(_held_by(strategy, model)), "strategy")
        for part in parts_of(optimizer).values():
            self._mark_optimizer(part)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._follow_phase()
        kwargs = kwargs or {}
        found = func(*args, **kwargs) if self._mode is None else self._without_values(func, args, kwargs)
        made = [found] if isinstance(found, Tensor) else tree_leaves(found)
        for each in made:
            if isinstance(each, Tensor):
                self._see(each)
        if self._mode is None:
            self._note_peak()
        else:
            if func in PRODUCTS:
                self._multiplying.add(self.phase == "backward")
            self._note_peak(workspace(func, args, found) + self._blas * len(self._multiplying))
            if func in UNKNOWN:
                self.unknown.add(str(func))
        return found

    def _note_peak(self, own: int = 0) -> None:
        """Keep what is in use if nothing was more; `own` is what a kernel needs for itself."""
        self._operations += 1
        if self.total + own >= self._totals.get(self.phase, 0):  # of equal ones the last, when all are marked
            self._totals[self.phase], self._reached[self.phase] = self.total + own, self._operations
            self.peaks[self.phase] = {**self._bytes, "kernels": own}

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation; it has values if its inputs do and it is small."""
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        are_known = not any(isinstance(each, FakeTensor) or each.requires_grad for each in inputs)
        try:
            found = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if are_known:
                return _with_values(func, args, kwargs)
            if isinstance(error, DynamicOutputShapeException):
                raise
            self.assumed += 1
            kind = args[0].dtype  # 0 as a scale or a norm, 1 as a count, false as a check
            return False if kind is torch.bool else 0.0 if kind.is_floating_point else 1
        except (UnsupportedOperatorException, NotImplementedError):
            if not hasattr(func, "_schema") or func._schema.returns:
                raise
            return None  # a kernel that writes into its arguments alone, such as that of fused SGD
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)] or inputs
        if are_known and made and all(each.numel() <= _MOST_VALUES for each in made):
            return _with_values(func, args, kwargs)  # positions and masks: models read them
        return found

    def _follow_phase(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            if self.phase != "backward":
                self.phase = "backward"
                self.saved = self._kept_by_module()
        elif self.phase == "backward":
            self.phase = "update"

    def _kept_by_module(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for block in self._blocks.values():
            if block.component == "activations":
                found[block.module] += block.size
        return dict(found)

    def _see(self, tensor: Tensor) -> None:
        storage = self._storage(tensor)
        if storage is None:
            return
        block = self._blocks.get(id(storage))
        if block is None:
            # in the backward pass only recomputed activations are computed with gradients
            is_kept = self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled())
            self._add(storage, "activations" if is_kept else "temporary")
        elif (size := self._rounded(storage.nbytes())) != block.size:  # it was resized
            self._count(block.component, size - block.size)
            block.size = size

    def _storage(self, tensor: Tensor) -> UntypedStorage | None:
        if tensor.device.type != self.device.type or (self.only_fake and not isinstance(tensor, FakeTensor)):
            return None
        if tensor.layout is not torch.strided:  # it has no storage
            return None
        return tensor.untyped_storage()

    def _add(self, storage: UntypedStorage, component: str) -> _Block:
        key, module = id(storage), self._modules[-1] if self._modules else LOSS
        ref = weakref.ref(storage, lambda _: self._free(key))
        block = _Block(self._rounded(storage.nbytes()), component, module, self._operations, ref)
        self._blocks[key] = block
        self._count(component, block.size)
        return block

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._count(block.component, -block.size)

    def _count(self, component: str, size: int) -> None:
        self._bytes[component] += size
        self.total += size

    def _rounded(self, size: int) -> int:
        return size if self.device.type != "cuda" else -(-size // _CUDA_BLOCK) * _CUDA_BLOCK

    def _mark_optimizer(self, part: Optimizer) -> None:
        self.mark(state_in_memory(part), "optimizer")

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._modules.append(name)

    def _leave(self, *_: object) -> None:
        self._modules.pop()


def _held_by(value: object, model: nn.Module, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in the attributes of an object, and of those objects; modules with all that they hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        if value is not model:
            yield from (*value.parameters(), *value.buffers())
    elif depth:
        for each in list(getattr(value, "__dict__", {}).values()):
            yield from _held_by(each, model, depth - 1)


def _with_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def tensors_in(value: Tree) -> Iterator[Tensor]:
    """The tensors in a value, or in a batch that a strategy has prepared."""
    if isinstance(value, TrainingBatch):
        value = (value.inputs, value.targets, value.weight)
    for each in tree_leaves(value):
        if isinstance(each, Tensor):
            yield each
