"""Leaves weights that a run does not change out of its checkpoints."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar

from torch import nn

__all__ = ["leave_out_frozen"]

_Model = TypeVar("_Model", bound=nn.Module)


def leave_out_frozen(model: _Model) -> _Model:
    """Leave frozen parameters out of a model's `state_dict`, and so out of checkpoints.

    It is for models that are made with the same frozen weights each time, such as quantised ones with adapters, whose
    weights a checkpoint may not be able to hold. Buffers are kept. A resumed run continues with the frozen weights that
    its model was made with; which parameters are frozen must not change during the run.

    >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    >>> sorted(leave_out_frozen(model).state_dict())
    ['1.bias', '1.weight']
    >>> model.load_state_dict(model.state_dict())
    <All keys matched successfully>

    Returns:
        The model itself.
    """
    model.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]  # of torch, as the next line
    model.register_load_state_dict_post_hook(_do_not_miss)  # type: ignore[no-untyped-call]
    return model


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
