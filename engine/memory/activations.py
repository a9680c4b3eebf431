"""Activation checkpointing: activations are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.operators import changes_arguments, draws, operators_of
from pulsetrain.engine.module_names import names_like
from pulsetrain.engine.step.memory_settings import ActivationCheckpointing

__all__ = ["recompute_activations"]

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_Place = tuple[str, str, bool]  # of a buffer: the name of its module, its own, and whether that module trains


class _Selection:
    """Decides which results of operators are kept; a policy of torch's."""

    def __init__(self, setting: ActivationCheckpointing) -> None:
        self._setting = setting
        self._keep, self._policy = operators_of(tuple(setting.keep)), setting.policy

    def __reduce__(self) -> tuple[object, ...]:
        return _Selection, (self._setting,)  # operators cannot be pickled

    def __call__(self, context: Any, operator: Any, /, *arguments: Any, **named: Any) -> CheckpointPolicy:
        is_kept = operator in self._keep
        if self._policy is not None:
            is_kept = self._policy(context, operator, *arguments, **named) in _SAVES
        if is_kept and not _has_effects(operator, arguments, named):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _has_effects(operator: Any, arguments: Sequence[object], named: Mapping[str, object]) -> bool:
    """Whether leaving a call out would change what follows it: random numbers, or a tensor that it writes into."""
    is_overload = isinstance(operator, OpOverload)
    return is_overload and (changes_arguments(operator) or draws(operator, arguments, named))


class _Recomputed:
    """A module's forward that keeps only its inputs; costs a second forward pass (Chen et al. 2016)."""

    def __init__(self, module: nn.Module, setting: ActivationCheckpointing) -> None:
        self.module, self.forward = module, module.forward
        self._changes: dict[_Place, bool] = {}  # whether a forward pass has changed a buffer
        selects = setting.keep or setting.policy is not None
        self._selecting = partial(create_selective_checkpoint_contexts, _Selection(setting)) if selects else None

    def __call__(self, *args: object, **kwargs: Any) -> object:
        contexts: dict[str, Any] = {"context_fn": self._contexts}
        if torch.compiler.is_compiling():  # a compiled graph has no side effects to undo, and takes no other contexts
            contexts = {} if self._selecting is None else {"context_fn": self._selecting}
        return checkpoint(self.forward, *args, use_reentrant=False, **contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        buffers = _Buffers(self.module, self._changes)
        if self._selecting is None:
            return buffers.noted(nullcontext()), _EachTime(partial(buffers.as_before, nullcontext()))
        saving, reading = self._selecting()
        return buffers.noted(saving), _EachTime(partial(buffers.as_before, reading))


class _EachTime(AbstractContextManager[None]):
    """A new context each time: a graph that is kept computes again in each of its backward passes."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        made = self._make()
        made.__enter__()
        self._entered.append(made)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _Buffers:
    """The buffers of a module that its forward pass changes, as they were before.

    The second pass computes with these, since its results may depend on them, as those of spectral normalisation do,
    and its own changes are discarded, so that running statistics do not count a batch twice.

    Args:
        module: computes.
        changes: whether an earlier pass has changed a buffer; those that none has changed are not copied.
    """

    def __init__(self, module: nn.Module, changes: dict[_Place, bool]) -> None:
        self._module, self._changes = module, changes
        self._before: list[tuple[nn.Module, str, Tensor | None]] = []

    @contextmanager
    def noted(self, inside: AbstractContextManager[Any]) -> Iterator[None]:
        """The first pass.

        Raises:
            RuntimeError: it writes into a buffer that earlier ones did not change.
        """
        found = {
            (path, name, owner.training): (owner, buffer, _version(buffer))
            for path, owner in self._module.named_modules()
            for name, buffer in owner._buffers.items()  # noqa: SLF001  # also those that are None until the first pass
        }
        copies = _copies([buffer for place, (_, buffer, _) in found.items() if self._changes.get(place, True)])
        with inside:
            yield
        for place, (owner, buffer, version) in found.items():
            path, name, _ = place
            now, before = owner._buffers.get(name), copies.get(id(buffer))  # noqa: SLF001
            written, known = _version(buffer) != version, self._changes.get(place)
            changed = written or now is not buffer
            if known is None and not changed and now is not None:
                assert before is not None
                changed = _differs(owner, now, before)
            self._changes[place] = bool(known) or changed
            if not self._changes[place]:
                continue
            if before is None and not written:
                before = buffer  # another one has taken its place, as of a table that grows
            elif before is None:
                raise RuntimeError(
                    f"the forward pass of {type(self._module).__name__} has changed the buffer "
                    f"{f'{path}.{name}' if path else name!r} for the first time, after passes that did not; its value "
                    "before is not known, with which activation_checkpointing computes again: leave that module out"
                )
            self._before.append((owner, name, before))

    @contextmanager
    def as_before(self, inside: AbstractContextManager[Any]) -> Iterator[None]:
        """The second pass, in which the first one's buffers are out of reach."""
        now = [(owner, name, getattr(owner, name)) for owner, name, _ in self._before]
        fresh = _copies([before for _, _, before in self._before])
        for owner, name, before in self._before:
            setattr(owner, name, fresh.get(id(before)))
        try:
            with inside:  # entered last: it counts the operators that are called
                yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


def _copies(buffers: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """By the id of each; several modules may have the same one."""
    return {id(each): each.detach().clone() for each in buffers if each is not None}


def _differs(owner: nn.Module, now: Tensor, before: Tensor) -> bool:
    """Whether a module has changed a buffer by a kernel that does not count it, as those of BatchNorm."""
    if owner.training and getattr(owner, "track_running_stats", False):
        return True  # though a mean of 0 may not have moved in this pass
    return not (now.is_meta or isinstance(now, FakeTensor) or torch.equal(now, before))


def _version(buffer: Tensor | None) -> int:
    """How often it was written to; a tensor of inference mode does not count that."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version  # noqa: SLF001  # has no public name


def recompute_activations(model: nn.Module, setting: str | ActivationCheckpointing | None) -> list[str]:
    """Let modules recompute their activations; the effect of an earlier call is undone first.

    Outputs, gradients, random draws (dropout) and buffers stay the same bit for bit: a buffer that the forward pass
    changes, such as running statistics or the vectors of spectral normalisation, is copied before, and both passes
    begin with the same values.

    Args:
        setting: the names of modules, alone or with what they keep; None for no module.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: no module has such a name, or no operator has one of the names to keep.

    >>> recompute_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*")
    ['0', '1']
    """
    modules = dict(model.named_modules())
    for module in modules.values():
        if isinstance(module.__dict__.get("forward"), _Recomputed):
            earlier = module.__dict__.pop("forward")
            if getattr(earlier.forward, "__func__", None) is not type(module).forward:
                module.forward = earlier.forward  # which was the user's own
    if setting is None:
        return []
    if isinstance(setting, str):
        setting = ActivationCheckpointing(setting)
    pattern = setting.modules
    found = names_like(model, pattern)
    if not found:
        raise ConfigurationError(
            f"no module of {type(model).__name__} has such a name; "
            f"there are: {', '.join(list(modules)[1:9]) or 'none at all'}{' ...' if len(modules) > 9 else ''}",
            activation_checkpointing=pattern,
        )
    idle = [name for name in found if type(modules[name]).forward is nn.Module.forward]
    if idle:
        raise ConfigurationError(
            f"{idle[0]!r} is a {type(modules[idle[0]]).__name__}, which computes nothing itself; name what is in it: "
            f"{idle[0] + '.*'!r}",
            activation_checkpointing=pattern,
        )
    operators_of(tuple(setting.keep))  # it refuses unknown ones
    found = found[:: setting.every]
    for name in found:
        modules[name].forward = _Recomputed(modules[name], setting)
    return found
