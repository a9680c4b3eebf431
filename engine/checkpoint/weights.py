"""Loads weights from a checkpoint, all or by prefix, and exchanges them with other tools as safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from pulsetrain.engine.checkpoint.choice import load_checkpoint
from pulsetrain.engine.checkpoint.disk import Disk, sync
from pulsetrain.engine.checkpoint.frozen import LeftOut, check_left_out, left_out_of
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, location_of
from pulsetrain.engine.checkpoint.pieces import StoredTensor
from pulsetrain.engine.checkpoint.validated import validated_weights
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["Mismatch", "compare_weights", "load_safetensors", "load_weights", "save_safetensors", "take_dtypes"]

_TAKEN = (torch.Tensor, nn.Parameter, StoredTensor)  # what has a dtype that a module can take
Shape = tuple[int, ...]  # () for a value that is not a tensor, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How weights and a model differ, by name; false if they do not."""

    missing: Mapping[str, Shape]  # only in the model
    unexpected: Mapping[str, Shape]  # only in the checkpoint
    misshapen: Mapping[str, tuple[Shape, Shape]]  # shape in the checkpoint, shape in the model

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


def compare_weights(mine: Mapping[str, object], saved: Mapping[str, object]) -> Mismatch:
    """Compare a model's state_dict with a saved one; of several names for one tensor, one is enough.

    >>> print(compare_weights({"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.ones(4)}))
    missing: b (3,); shape: a is (4,) in the checkpoint, (2,) in the model
    """
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


def take_dtypes(module: nn.Module, saved: Mapping[str, object]) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Convert the module's tensors to the dtypes that they have in a saved state_dict, which is to be loaded then.

    >>> linear = nn.Linear(2, 1)
    >>> take_dtypes(linear, {"bias": torch.zeros(1, dtype=torch.float64)}), linear.bias.dtype
    ({'bias': (torch.float32, torch.float64)}, torch.float64)

    Returns:
        Of each tensor that was converted, by its name: the dtype that it had and the one that it has.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:  # which knows what it loads
        return {}
    found: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    converted: dict[int, torch.Tensor] = {}  # a tensor may have several names
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in held:
        value = saved.get(name)
        if not isinstance(value, (torch.Tensor, StoredTensor)) or type(value) not in _TAKEN:
            continue
        dtype = value.dtype
        if dtype == tensor.dtype:
            continue
        found[name] = tensor.dtype, dtype
        if isinstance(tensor, nn.Parameter):
            tensor.data, tensor.grad = tensor.data.to(dtype), None
            continue
        place, _, last = name.rpartition(".")
        converted.setdefault(id(tensor), tensor.to(dtype))
        setattr(module.get_submodule(place), last, converted[id(tensor)])
    return found


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str | None = "model",
    prefix: str = "",
    new_prefix: str = "",
    strict: bool = True,
    averages: bool = True,
) -> Mismatch:
    """Load only the weights of a checkpoint into a model, converted to the model's dtype and device.

    They are those that the run validated with: where EMA or SWA did that with averages, the averages. A log line says
    so.

    Of a model with adapters, the checkpoint may hold the adapters alone, and the digest of the rest: the model has to
    have those weights already.

    >>> import tempfile
    >>> from pulsetrain.engine.checkpoint import CheckpointManager
    >>> trained, model = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = CheckpointManager(folder).save({"model": trained.state_dict()})
    ...     mismatch = load_weights(model, path, new_prefix="0.")
    >>> bool(mismatch), torch.equal(model[0].weight, trained.weight)
    (False, True)

    Args:
        model: the model.
        path: the checkpoint.
        key: the checkpoint's key for the weights; None if the checkpoint is nothing but weights.
        prefix: load only entries whose names begin with it, and remove it from their names.
        new_prefix: added to their names. Entries of the model without it are neither loaded nor reported missing.
        strict: raise if the weights do not fit; else load those that fit.
        averages: with False, load the weights that were trained in any case. It concerns the key "model".

    Returns:
        What did not fit; with `strict`, nothing.

    Raises:
        CheckpointError: as `load_checkpoint`; or the weights do not fit, or no entry has the prefix, or what the
            checkpoint has left out differs in the model, or the averages are not of the model's weights, or SWA has not
            measured the statistics of batch normalisation with them. The model is unchanged.
    """
    checkpoint = load_checkpoint(path)
    weights = checkpoint if key is None else checkpoint.get(key)
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{path} has no weights of that name; choose a key that it has: {', '.join(map(str, checkpoint))}",
            "load_weights",
            key=key,
        )
    whole = key == "model" and not prefix and not new_prefix
    left_out = left_out_of(checkpoint) if whole else None
    caller = f"load_weights({str(path)!r})"
    if key == "model" and averages:
        weights = validated_weights(checkpoint, caller)
    return _load(model, weights, caller, prefix, new_prefix, strict, left_out)


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a model's weights as a safetensors file, atomically; an existing file is replaced.

    If a tensor has several names, as tied weights do, it is written under one; the metadata lists the others.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_safetensors(nn.Linear(2, 1), Path(folder, "model.safetensors"))
    ...     load_safetensors(nn.Linear(2, 1), path)
    Mismatch(missing={}, unexpected={}, misshapen={})

    Args:
        model: the model.
        path: the file.
        metadata: texts to store in the file's header.

    Raises:
        ConfigurationError: the package safetensors is not installed, or the path is a URL.
        CheckpointError: safetensors cannot hold the weights: tensors overlap, or a value is not a tensor.
        OSError: the file could not be written; an existing file is unchanged.
    """
    _check_whole(model, "save_safetensors", "`pulsetrain checkpoint consolidate RUN` writes those of a checkpoint")
    torch_form, failure = _safetensors("save_safetensors")
    target = _local(path, "save_safetensors")
    others = [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{target}: safetensors cannot hold these weights: {', '.join(others)} is not a tensor; "
            "save a checkpoint instead"
        )

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
    model: nn.Module, path: str | os.PathLike[str], *, prefix: str = "", new_prefix: str = "", strict: bool = True
) -> Mismatch:
    """Load weights that any tool has written; `prefix`, `new_prefix` and `strict` as in `load_weights`.

    The format has no digest: a changed number is not detected.

    >>> import tempfile
    >>> whole, head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_safetensors(whole, Path(folder, "model.safetensors"))
    ...     mismatch = load_safetensors(head, path, prefix="1.")
    >>> bool(mismatch), torch.equal(head.weight, whole[1].weight)
    (False, True)

    Returns:
        What did not fit; with `strict`, nothing.

    Raises:
        ConfigurationError: the package safetensors is not installed, or the path is a URL.
        CheckpointError: the file is missing or not a safetensors file, or as `load_weights`.
    """
    torch_form, failure = _safetensors("load_safetensors")
    file = _local(path, "load_safetensors")
    try:
        weights = torch_form.load_file(str(file))
    except (failure, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
    return _load(model, weights, f"load_safetensors({str(path)!r})", prefix, new_prefix, strict)


def _load(
    model: nn.Module,
    weights: Mapping[str, object],
    caller: str,
    prefix: str,
    new_prefix: str,
    strict: bool,
    left_out: LeftOut | None = None,
) -> Mismatch:
    _check_whole(model, caller, "load the weights before the Trainer splits it up")
    chosen = {new_prefix + name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        raise CheckpointError(f"{caller}: no entry begins with {prefix=}; there are {', '.join(weights) or 'none'}")
    mine = {name: value for name, value in model.state_dict().items() if name.startswith(new_prefix)}
    mismatch = compare_weights(mine, chosen)
    if left_out is not None:
        check_left_out(f"{caller}: ", left_out, model)
        missing = {name: shape for name, shape in mismatch.missing.items() if name not in left_out["names"]}
        mismatch = replace(mismatch, missing=missing)
    if mismatch and strict:
        remedy = f"pulsetrain.engine.checkpoint.{caller.partition('(')[0]}(..., strict=False) loads what fits"
        raise CheckpointError(f"{caller}: does not fit the model: {mismatch}; {remedy}")
    fitting = {name: value for name, value in chosen.items() if name in mine and name not in mismatch.misshapen}
    model.load_state_dict(fitting, strict=False)
    return mismatch


def _check_whole(model: nn.Module, caller: str, remedy: str) -> None:
    if any(hasattr(each, "to_local") or each.is_meta for each in model.parameters()):
        raise CheckpointError(f"{caller}: the model is sharded, and this process has a part of its weights; {remedy}")


def _identity(value: object) -> object:
    """Equal only for two names of the same tensor."""
    if isinstance(value, torch.Tensor) and value.data_ptr():
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return id(value)


def _shape(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, (torch.Tensor, StoredTensor)) else ()


def _safetensors(caller: str) -> tuple[ModuleType, type[Exception]]:
    try:
        from safetensors import SafetensorError, torch
    except ImportError as error:
        raise ConfigurationError(
            f"{caller}(): needs a package that is not installed ({error}); pip install 'pulsetrain[safetensors]'"
        ) from error
    return torch, SafetensorError


def _local(path: str | os.PathLike[str], caller: str) -> Path:
    file = location_of(path)
    if isinstance(file, CheckpointUrl):
        raise ConfigurationError("only files of this machine are supported; copy the file", caller, path=str(path))
    return file
