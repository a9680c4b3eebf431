"""Weights alone: from a checkpoint, whole or by prefix, and to and from safetensors for exchange with other tools."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulsetrain.engine.checkpoint.disk import Disk, sync
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, place_of
from pulsetrain.engine.checkpoint.reader import load_checkpoint
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["Mismatch", "compare_weights", "load_safetensors", "load_weights", "save_safetensors"]

Shape = tuple[int, ...]  # () also of what is no tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Where weights and a model differ, by name; false where nowhere."""

    missing: Mapping[str, Shape]  # in the model alone
    unexpected: Mapping[str, Shape]  # in the checkpoint alone
    misshapen: Mapping[str, tuple[Shape, Shape]]  # in the checkpoint, in the model

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        lines = [f"missing: {name} {shape}" for name, shape in self.missing.items()]
        lines += [f"unexpected: {name} {shape}" for name, shape in self.unexpected.items()]
        lines += [
            f"shape: {name} is {saved} in the checkpoint, {mine} in the model"
            for name, (saved, mine) in self.misshapen.items()
        ]
        return "; ".join(lines)


def compare_weights(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> Mismatch:
    """A model's state_dict beside a saved one; of names for one tensor, the model's others are not missed."""
    present = {_identity(mine[name]) for name in mine.keys() & saved.keys()}
    return Mismatch(
        missing={
            name: _shape(value) for name, value in mine.items() if name not in saved and _identity(value) not in present
        },
        unexpected={name: _shape(value) for name, value in saved.items() if name not in mine},
        misshapen={
            name: (_shape(saved[name]), _shape(value))
            for name, value in mine.items()
            if name in saved and _shape(saved[name]) != _shape(value)
        },
    )


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = "model",
    prefix: str = "",
    new_prefix: str = "",
    strict: bool = True,
) -> Mismatch:
    """Load a checkpoint's weights into a model, and nothing else of it; they take the model's dtype and device.

    Args:
        key: what the checkpoint calls the weights; None where it is nothing but weights.
        prefix: only entries whose names begin so, which is then left off.
        new_prefix: put before their names. Of the model, only entries that begin so are loaded or missed.
        strict: refuse what does not fit; else load what fits.

    Returns:
        What did not fit; with `strict`, nothing.

    Raises:
        CheckpointError: as `load_checkpoint`; or something does not fit, or no entry has the prefix. The model is as
            it was.
    """
    checkpoint = load_checkpoint(path)
    weights = checkpoint if key is None else checkpoint.get(key)
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"load_weights({key=}): {path} has no weights of that name; it has {', '.join(map(str, checkpoint))}"
        )
    return _load(model, weights, f"load_weights({str(path)!r})", prefix, new_prefix, strict)


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a model's weights for other tools; an older file of that name is replaced at once, when all is durable.

    Of several names for one tensor, as with tied weights, one is written; the metadata says so of the others.

    Raises:
        ConfigurationError: the package safetensors is not there, or the path is a URL.
        CheckpointError: the weights hold what safetensors cannot: tensors that overlap, or what is no tensor.
        OSError: it could not be written; an older file is as it was.
    """
    torch_form, failure = _safetensors("save_safetensors")
    target = _local(path, "save_safetensors")
    others = [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(f"{target}: safetensors cannot hold these weights: {', '.join(others)}: not a tensor")

    def write(partial: Path) -> None:
        try:
            # "format" is what readers of other frameworks' files look for
            torch_form.save_model(model, str(partial), metadata={"format": "pt", **(metadata or {})})
        except failure as error:
            raise OSError(f"{target}: cannot be written: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{target}: safetensors cannot hold these weights: {error}") from error
        sync(partial)

    Disk().replace_by(target, write)
    return target


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    new_prefix: str = "",
    strict: bool = True,
) -> Mismatch:
    """Load weights that any tool has written; `prefix`, `new_prefix` and `strict` as in `load_weights`.

    Its format has no digest: a changed number in it is not noticed.

    Returns:
        What did not fit; with `strict`, nothing.

    Raises:
        ConfigurationError: the package safetensors is not there, or the path is a URL.
        CheckpointError: the file is missing or none of safetensors', or as `load_weights`.
    """
    torch_form, failure = _safetensors("load_safetensors")
    file = _local(path, "load_safetensors")
    try:
        weights = torch_form.load_file(str(file))
    except (failure, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
    return _load(model, weights, f"load_safetensors({str(path)!r})", prefix, new_prefix, strict)


def _load(
    model: nn.Module, weights: Mapping[str, Any], place: str, prefix: str, new_prefix: str, strict: bool
) -> Mismatch:
    chosen = {new_prefix + name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{place}: no entry begins with {prefix=}; there are {', '.join(weights) or 'none'}")
    mine = {name: value for name, value in model.state_dict().items() if name.startswith(new_prefix)}
    mismatch = compare_weights(mine, chosen)
    if mismatch and strict:
        raise CheckpointError(f"{place}: does not fit the model: {mismatch}; strict=False loads what fits")
    fitting = {name: value for name, value in chosen.items() if name in mine and name not in mismatch.misshapen}
    model.load_state_dict(fitting, strict=False)
    return mismatch


def _identity(value: Any) -> object:
    """Equal for two names of one tensor alone."""
    if isinstance(value, torch.Tensor) and value.data_ptr():
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return id(value)


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _safetensors(place: str) -> tuple[Any, type[Exception]]:
    try:
        from safetensors import SafetensorError, torch
    except ImportError as error:
        raise ConfigurationError(
            f"{place}(): needs a package that is not there ({error}); pip install 'pulsetrain[safetensors]'"
        ) from error
    return torch, SafetensorError


def _local(path: str | os.PathLike[str], place: str) -> Path:
    file = place_of(path)
    if isinstance(file, CheckpointUrl):
        raise ConfigurationError(f"{place}(path={str(path)!r}): reaches files of this machine only; copy it")
    return file
