"""Optimizers whose state is kept outside the device's memory between updates.

An optimizer's step needs the state of one parameter at a time. So an update of all parameters is made in parts: the
state of some parameters is brought in, the optimizer's own step updates them, and the state is moved out.
"""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.state_memory import HostState, MappedState, Slots, StateMemory
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.step.memory_settings import OptimizerOffload

__all__ = ["ELEMENTWISE", "bytes_at_a_time", "offload_optimizer", "state_in_memory"]

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers whose steps use each element of weights and gradients by itself."""

_HOOKS = tuple(
    f"_optimizer_{of}_{when}_hooks" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
_ALIGNED = 1024  # elements of a piece are a multiple: kernels compute the last few of a tensor by other instructions
_SHARE, _LARGEST = 32, 64 << 20  # a part is by default this share of the state, and at most so many bytes


def offload_optimizer(optimizer: Optimizer, setting: OptimizerOffload) -> None:
    """Keep an optimizer's state, or that of its parts, outside the device's memory from now on.

    The optimizer stays the same object, of a subclass that has the name of its class. Its `state` holds the tensors
    where they are kept, so that its state dict, and the checkpoints made of it, are as before. A copy of the optimizer,
    also by pickle, has its state in memory.

    Args:
        optimizer: one of torch's that updates each element by itself, or several of them by name.
        setting: where to, and how much at a time.

    Raises:
        ConfigurationError: it is not such an optimizer, keeps no state, or there is no room.

    >>> model = nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> offload_optimizer(optimizer, OptimizerOffload(to="disk"))
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> type(optimizer).__name__, list(optimizer.state[model.weight])
    ('AdamW', ['step', 'exp_avg', 'exp_avg_sq'])
    """
    parts = [each for each in parts_of(optimizer).values() if not isinstance(each, _StateElsewhere)]
    if not parts:
        return
    for part in parts:
        _check(part, setting)
    parameters = [[each for group in part.param_groups for each in group["params"]] for part in parts]
    wanted = [_states_like(part, type(part), each) for part, each in zip(parts, parameters, strict=True)]
    size = sum(each.nbytes for states in wanted for values in states for each in values.values())
    if not size:
        raise ConfigurationError("keeps no state for its parameters; leave it out", _PLACE, optimizer_offload=setting)
    if setting.to == "disk":
        memory: StateMemory = MappedState(Path(setting.folder or tempfile.gettempdir()))
    else:
        memory = HostState(pinned=any(each.device.type == "cuda" for part in parameters for each in part))
    slots = memory.reserve([values for states in wanted for values in states])  # first: it may fail
    part_bytes = bytes_at_a_time(setting, size)
    for part, each in zip(parts, parameters, strict=True):
        _StateElsewhere.adopt(part, memory, dict(zip(each, slots, strict=False)), part_bytes)
        slots = slots[len(each) :]


def bytes_at_a_time(setting: OptimizerOffload, size: int) -> int:
    """How many bytes of a state of this size an update works on at a time.

    >>> bytes_at_a_time(OptimizerOffload(), 3200), bytes_at_a_time(OptimizerOffload(part_bytes=1000), 3200)
    (100, 1000)
    """
    return setting.part_bytes or min(max(size // _SHARE, 1), _LARGEST)


def state_in_memory(optimizer: Optimizer) -> list[object]:
    """The values of an optimizer's state, but for those that are in a file."""
    if not isinstance(optimizer, _StateElsewhere) or not isinstance(optimizer._memory, MappedState):
        return [list(values.values()) for values in optimizer.state.values()]
    slots = optimizer._slots
    return [
        value
        for parameter, values in optimizer.state.items()
        for name, value in values.items()
        if value is not slots.get(parameter, {}).get(name)
    ]


_PLACE = "TrainingConfig"


class _StateElsewhere(Optimizer):
    """An optimizer whose state is elsewhere: the base of classes that are made for one optimizer each."""

    _kind: type[Optimizer]  # its class without this one
    _memory: StateMemory
    _slots: dict[Tensor, dict[str, Tensor]]  # where the state of each parameter is kept
    _part_bytes: int

    @staticmethod
    def adopt(optimizer: Optimizer, memory: StateMemory, slots: Mapping[Tensor, Slots], part_bytes: int) -> None:
        """Let an optimizer be of such a class, and move the state that it has."""
        kind, made = type(optimizer), cast(Any, optimizer)
        made.__class__ = type(kind.__name__, (_StateElsewhere, kind), {"_kind": kind})
        made.__dict__.pop("step", None)  # torch's schedulers have replaced it to note that it was called
        made._patch_step_function()  # for its hooks
        made._memory, made._part_bytes = memory, part_bytes
        made._slots = {parameter: dict(each) for parameter, each in slots.items()}
        for parameter in made.state:
            made._move_out([parameter])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The optimizer's own step, for some parameters at a time."""
        self._opt_called = True  # which torch's schedulers ask for
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._memory.release()  # what others have read since the last step
        for group, parameters in self._parts():
            if len(parameters) == 1 and self._is_large(parameters[0]):
                self._step_in_pieces(group, parameters[0])
                continue
            self._bring_in(parameters)
            _own_step(_twin(self, self._kind, group, parameters, self.state))
            self._move_out(parameters)
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as if a scheduler had replaced it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        slots = self._memory.reserve(_states_like(self, self._kind, added))
        self._slots.update({parameter: dict(each) for parameter, each in zip(added, slots, strict=True)})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of one parameter at a time, so that the device never holds all of it."""
        super().load_state_dict({**state_dict, "state": {}})
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                if index in state_dict["state"]:
                    one = {"state": {0: state_dict["state"][index]}, "param_groups": [{**options, "params": [0]}]}
                    twin = _twin(self, self._kind, group, [parameter], defaultdict(dict))
                    twin.load_state_dict(one)
                    self.state[parameter] = twin.state[parameter]
                    self._move_out([parameter])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self._kind,), self.__getstate__()

    def _parts(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """The parameters with gradients, some at a time, with their groups."""
        for group in self.param_groups:
            part: list[Tensor] = []
            size = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                needed = sum(each.nbytes for each in self._slots.get(parameter, {}).values())
                if part and size + needed > self._part_bytes:
                    yield group, part
                    part, size = [], 0
                part.append(parameter)
                size += needed
            if part:
                yield group, part

    def _is_large(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is brought in piece by piece."""
        slots, gradient = self._slots[parameter], parameter.grad
        size = sum(each.nbytes for each in slots.values())
        if size <= self._part_bytes or gradient is None or gradient.layout is not torch.strided:
            return False
        whole = (parameter, gradient, *slots.values())
        in_place = all(
            value is slots.get(name)
            for name, value in self.state.get(parameter, {}).items()
            if _is_offloaded(value, parameter)
        )
        return in_place and all(each.is_contiguous() for each in whole)

    def _step_in_pieces(self, group: Mapping[str, Any], parameter: Tensor) -> None:
        """The step for one parameter, for some of its elements at a time."""
        slots, before, after = self._slots[parameter], self.state.get(parameter, {}), {}
        weights, gradient = parameter.detach().view(-1), cast(Tensor, parameter.grad).view(-1)
        count = self._part_bytes * parameter.numel() // sum(each.nbytes for each in slots.values())
        count = max(count // _ALIGNED * _ALIGNED, _ALIGNED)
        for start in range(0, parameter.numel(), count):
            there = slice(start, start + count)
            piece = nn.Parameter(weights[there], requires_grad=False)
            piece.grad = gradient[there]
            kept = {name: slot.view(-1)[there] for name, slot in slots.items()}
            own = {
                name: _brought_in(kept[name], piece) if name in kept else copy.deepcopy(value)
                for name, value in before.items()
            }
            twin = _twin(self, self._kind, group, [piece], defaultdict(dict, {piece: own}))
            _own_step(twin)
            after = twin.state[piece]
            for name in kept.keys() & after.keys():
                if after[name] is not kept[name]:
                    kept[name].copy_(after[name])
            self._memory.release([kept])
        self.state[parameter].update({name: slots.get(name, value) for name, value in after.items()})

    def _bring_in(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for name, slot in self._slots.get(parameter, {}).items():
                if state.get(name) is slot:
                    state[name] = _brought_in(slot, parameter)

    def _move_out(self, parameters: Sequence[Tensor]) -> None:
        """Copy state that is not where it is kept to there, and release that."""
        for parameter in parameters:
            state = self.state.get(parameter, {})
            for name, value in state.items():
                if not _is_offloaded(value, parameter):
                    continue
                slot = self._slots.setdefault(parameter, {}).get(name)
                if value is slot:
                    continue
                if slot is None or slot.dtype != value.dtype or slot.stride() != value.stride():
                    (made,) = self._memory.reserve([{name: value}])
                    slot = self._slots[parameter][name] = made[name]
                state[name] = slot.copy_(value)
        self._memory.release([self._slots.get(each, {}) for each in parameters])


def _new(kind: type[Optimizer]) -> Optimizer:
    return kind.__new__(kind)


def _twin(
    optimizer: Optimizer, kind: type[Optimizer], group: Mapping[str, Any], parameters: Sequence[Tensor], state: Any
) -> Optimizer:
    """An optimizer of the class with the same attributes over some of a group's parameters, without hooks."""
    twin = _new(kind)
    twin.__dict__.update(vars(optimizer), param_groups=[{**group, "params": list(parameters)}], state=state)
    for name in _HOOKS:
        twin.__dict__[name] = OrderedDict()
    return twin


def _own_step(optimizer: Optimizer) -> None:
    """The optimizer's step without the hooks that torch has put around it, which are for all parts together."""
    type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def _states_like(optimizer: Optimizer, kind: type[Optimizer], parameters: Iterable[Tensor]) -> list[dict[str, Tensor]]:
    """Tensors without memory like those that steps make for parameters: found by a step over two numbers."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    off = {"lr": 0.1, "fused": False, "foreach": False, "capturable": False}
    found = []
    dtypes: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
    for parameter in parameters:
        group = groups[parameter]
        key = id(group), parameter.dtype
        if key not in dtypes:
            one = nn.Parameter(torch.zeros(2, dtype=parameter.dtype))
            one.grad = torch.zeros_like(one)
            options = {**group, **{name: value for name, value in off.items() if name in group}}
            twin = _twin(optimizer, kind, options, [one], defaultdict(dict))
            _own_step(twin)
            dtypes[key] = {name: each.dtype for name, each in twin.state[one].items() if _is_offloaded(each, one)}
        of_state = dtypes[key] if _has_offloaded(parameter) else {}
        found.append(
            {name: torch.empty_like(parameter, dtype=dtype, device="meta") for name, dtype in of_state.items()}
        )
    return found


def _is_offloaded(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of a parameter's state is a tensor of its shape; what is smaller stays in memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.shape == parameter.shape and _has_offloaded(parameter)


def _has_offloaded(parameter: Tensor) -> bool:
    return parameter.dim() > 0 and parameter.numel() > 0


def _brought_in(slot: Tensor, parameter: Tensor) -> Tensor:
    """The state for a step: a copy on the parameter's device, or itself."""
    return slot.to(parameter.device, copy=True) if _moves(slot, parameter) else slot


def _moves(slot: Tensor, parameter: Tensor) -> bool:
    """Whether a step needs a copy of the state; on the CPU, it works where the state is kept."""
    return slot.device != parameter.device


def _check(optimizer: Optimizer, setting: OptimizerOffload) -> None:
    """Refuse an optimizer whose state cannot be elsewhere."""
    rule = ""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        rule = f"{type(optimizer).__name__} cannot update one parameter after the other; choose one of {names}"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        rule = "an optimizer with differentiable=True needs its state in memory"
    elif "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        rule = f"the step() of this {type(optimizer).__name__} has been replaced, which would be lost"
    elif any(hasattr(each, "to_local") for group in optimizer.param_groups for each in group["params"]):
        rule = "each process has a part of the weights, and of the optimizer's state; leave it out"
    if rule:
        raise ConfigurationError(rule, _PLACE, optimizer_offload=setting)
