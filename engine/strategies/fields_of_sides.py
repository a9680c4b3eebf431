"""What only the model reads of a batch with several answers in a row, such as the pixels that both are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.strategies.language import READ, LanguageStrategy

__all__ = ["fields_of_sides", "padded_to"]

_SIDES = ("", "chosen_", "rejected_", "kl_")  # before these names in batches of answers, of whatever strategy
_OF_ROWS = {"margin", "desirable"}  # further ones of such batches, which may serve several strategies
_GRIDS = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}  # of patches, one row each


def fields_of_sides(
    strategy: LanguageStrategy, batch: Mapping[str, Any], read: Mapping[str, Tensor], *, cut: bool
) -> dict[str, Tensor]:
    """The further inputs of a forward pass over the rows of all sides, one side after the other.

    A field without a prefix, such as "pixel_values", belongs to all answers of a row. One with the prefix of each side,
    such as "chosen_token_type_ids", has a value for each token of that side's answer. Patches of images, as Qwen2-VL
    takes them, are not one row for each answer: "image_grid_thw" says how many each image has.

    Args:
        strategy: knows what the model's forward accepts.
        batch: the loader's.
        read: the tokens of each side by its prefix, each of shape (rows, length).
        cut: whether the model is called without the last token.

    Raises:
        TypeError: forward does not accept a field, or it is an array of another library.
        ValueError: a field has another number of rows.
    """
    length, rows = max(tokens.shape[1] for tokens in read.values()), len(next(iter(read.values())))
    own = _of_tokens(strategy, batch, read)
    names = {f"{side}{name}" for side in (*read, *_SIDES) for name in READ} | _OF_ROWS
    names |= {f"{side}{name}" for side in read for name in own}
    found = strategy.unread(batch, lambda name: name in names or name.startswith("reference_"))
    for name, each in found.items():
        if name in _GRIDS and _GRIDS[name] in found:
            _check_patches(strategy, name, each, found[_GRIDS[name]])
        elif name not in _GRIDS.values() and (not each.ndim or len(each) != rows):
            place = type(strategy).__name__
            raise ValueError(f"{place}: {name!r} is {describe(each)}, and there are {rows} rows; one for each")
    shared = {name: torch.cat([each] * len(read)) for name, each in found.items()}
    for name, sides in own.items():
        whole = torch.cat([padded_to(length, each, 0) for each in sides])
        shared[name] = whole[:, :-1] if cut else whole
    return shared


def padded_to(length: int, rows: Tensor, value: int) -> Tensor:
    """The rows with this value after their end, shape (rows, length)."""
    return torch.nn.functional.pad(rows, (0, length - rows.shape[1]), value=value)


def _of_tokens(
    strategy: LanguageStrategy, batch: Mapping[str, Any], read: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """The fields with a value for each token of each side, by their names without a prefix."""
    first = next(iter(read))
    found: dict[str, list[Tensor]] = {}
    for name in [each.removeprefix(first) for each in batch if first and each.startswith(first)]:
        fitting = [
            each
            for side, tokens in read.items()
            if isinstance(each := batch.get(f"{side}{name}"), Tensor) and each.shape == tokens.shape
        ]
        if name not in READ and strategy.accepts(name) and len(fitting) == len(read):
            found[name] = fitting
    return found


def _check_patches(strategy: LanguageStrategy, name: str, patches: Tensor, grid: Tensor) -> None:
    if grid.ndim == 2 and grid.shape[1] == 3 and grid.is_cpu and int(grid.prod(1).sum()) != len(patches):
        raise ValueError(
            f"{type(strategy).__name__}: {name!r} is {describe(patches)}, and {_GRIDS[name]!r} counts "
            f"{int(grid.prod(1).sum())} patches; let the loader join the patches of all images in the order of the rows"
        )
