"""Leaves weights that a run does not change out of its checkpoints, and names them there by a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from pulsetrain.engine.errors import CheckpointError

__all__ = ["FrozenWeights", "LeftOut", "check_left_out", "leave_out_adapted", "leave_out_frozen", "left_out_of"]

_Model = TypeVar("_Model", bound=nn.Module)
_NAMES = "_left_out_of_state_dict"  # the attribute of a module whose frozen weights are left out: their names


class LeftOut(TypedDict):
    """What a checkpoint says of the weights that it does not hold."""

    names: list[str]
    digest: str | None  # of what the main process holds of them; None if all are quantised
    held: str  # "whole", or which shards the main process holds: digests of others are not compared


def leave_out_frozen(model: _Model) -> _Model:
    """Leave frozen parameters out of a model's `state_dict`, and so out of checkpoints.

    It is for models that are made with the same frozen weights each time, such as those with adapters. A Trainer does
    it for models of peft. Buffers are kept. Checkpoints hold a digest of what was left out: resuming with other frozen
    weights is an error. Which parameters are frozen must not change during the run.

    >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    >>> sorted(leave_out_frozen(model).state_dict())
    ['1.bias', '1.weight']
    >>> model.load_state_dict(model.state_dict())
    <All keys matched successfully>

    Returns:
        The model itself.
    """
    if _NAMES not in vars(model):
        # those of now: a frozen copy that a strategy adds, such as a reference, is not of the model that was given
        setattr(model, _NAMES, tuple(name for name, each in _parameters(model).items() if not each.requires_grad))
        model.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]  # of torch, as the next line
        model.register_load_state_dict_post_hook(_do_not_miss)  # type: ignore[no-untyped-call]
    return model


def leave_out_adapted(model: nn.Module) -> bool:
    """Leave the frozen weights of models with adapters of peft out, wherever they are in a module; whether any are."""
    if hasattr(model, "peft_config") and any(not each.requires_grad for each in model.parameters()):
        leave_out_frozen(model)
        return True
    found = [leave_out_adapted(each) for each in model.children()]  # of all, not up to the first
    return any(found)


class FrozenWeights:
    """What a module leaves out of its `state_dict`; values are read again only if they were written to.

    >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    >>> FrozenWeights(model).left_out() is None
    True
    >>> FrozenWeights(leave_out_frozen(model)).left_out()["names"]
    ['0.weight', '0.bias']

    Args:
        model: the whole, of which parts may leave something out.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: list[tuple[str, int, int]] = []  # of each tensor: its name, where it is, and how often written to
        self._found: LeftOut = {"names": [], "digest": None, "held": "whole"}

    def left_out(self) -> LeftOut | None:
        """Names and digest; None if nothing is left out."""
        found = dict(_left_out(self._model))
        if not found:
            return None
        read = [(name, each.data_ptr(), each._version) for name, each in _plain(found)]  # noqa: SLF001  # of autograd
        if read != self._read or [*found] != self._found["names"]:
            self._read, self._found = read, _described(found)
        return self._found


def left_out_of(checkpoint: Mapping[str, Any]) -> LeftOut | None:
    """What a run's checkpoint says that it does not hold of the model; None if it holds all."""
    modules = checkpoint.get("modules")
    of_model = modules.get("model") if isinstance(modules, Mapping) else None
    found: LeftOut | None = of_model.get("left_out") if isinstance(of_model, Mapping) else None
    return found


def check_left_out(place: str, left_out: LeftOut, model: nn.Module) -> None:
    """Refuse a model whose weights are not those that a checkpoint has left out.

    Args:
        place: the start of an error message, such as "load_weights(): ".

    Raises:
        CheckpointError: it lacks one of them, or their digest differs.
    """
    mine = _parameters(model)
    lacking = [name for name in left_out["names"] if name not in mine]
    if lacking:
        raise CheckpointError(
            f"{place}the checkpoint leaves {lacking[0]} to the model, which has no such parameter; make the model as "
            "it was, with its adapters"
        )
    found = _described({name: mine[name] for name in left_out["names"]})
    digests = left_out["digest"], found["digest"]
    if left_out["held"] == found["held"] and None not in digests and digests[0] != digests[1]:
        raise CheckpointError(
            f"{place}the frozen weights of the model are not those that the checkpoint's adapters were trained with "
            f"(digest {digests[0]} in the checkpoint, {digests[1]} here); make the model from the same files or the "
            "same seed"
        )


def _left_out(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for place, part in model.named_modules():
        names = vars(part).get(_NAMES, ())
        mine = _parameters(part) if names else {}
        for name in names:
            if name in mine and not mine[name].requires_grad:
                yield f"{place}.{name}" if place else name, mine[name]


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _described(tensors: Mapping[str, Tensor]) -> LeftOut:
    plain = _plain(tensors)
    found = hashlib.blake2b(digest_size=16)
    for name, each in sorted(plain, key=lambda pair: pair[0]):
        found.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        found.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    shards: list[Any] = [each for each in tensors.values() if hasattr(each, "to_local")]
    held = "whole"
    if shards:
        mesh = shards[0].device_mesh
        held = f"{mesh.get_coordinate()} of {list(mesh.shape)}"
    return {"names": list(tensors), "digest": found.hexdigest() if plain else None, "held": held}


def _plain(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Those whose values can be read here: a part of a shard; not those that a package has quantised."""
    here = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in tensors.items()}
    return [(name, each) for name, each in here.items() if type(each) in (Tensor, nn.Parameter) and not each.is_meta]


def _leave_out(model: nn.Module, state: MutableMapping[str, Any], prefix: str, _metadata: object) -> None:
    kept = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    kept |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in [each for each in state if each.startswith(prefix)]:
        if name.removeprefix(prefix) not in kept:  # of a quantised weight, there are further tensors
            del state[name]


def _do_not_miss(model: nn.Module, keys: Any) -> None:
    frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
    # the names are those of the module that is loaded, which may hold the model as a part
    keys.missing_keys[:] = [
        each for each in keys.missing_keys if not any(f".{each}".endswith(f".{name}") for name in frozen)
    ]
