"""Models as files of other tools: programs of torch.export, and ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.step.protocols import Tree, describe

__all__ = ["merged", "write_onnx", "write_program"]


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters added to its weights, in place, if it is one of peft's; any other as it is."""
    merge = getattr(model, "merge_and_unload", None)
    return merge() if callable(merge) else model


def write_program(model: nn.Module, inputs: Tree, file: Path) -> None:
    """Write a program of `torch.export`, which `torch.export.load(file).module()` makes callable without the model.

    The size of the first dimension of its inputs may vary, where the model allows that.

    Args:
        inputs: an example: a tensor, a tuple of positional arguments, or a mapping by name.

    Raises:
        ConfigurationError: torch.export cannot trace the model; the message has its reason.
    """
    args, kwargs, shapes = _call(model, inputs)
    try:
        with torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise _untraceable("torch.export", model, inputs, error) from error
    torch.export.save(program, file)


def write_onnx(model: nn.Module, inputs: Tree, file: Path) -> None:
    """Write the model for runtimes of ONNX; the first dimension may vary as in `write_program`.

    Raises:
        ConfigurationError: onnx or onnxscript is not installed, or the model cannot be traced or has an operation that
            ONNX lacks.
    """
    for package in ("onnx", "onnxscript"):
        load_optional("pulsetrain export --format onnx", package, "onnx")
    args, kwargs, shapes = _call(model, inputs)
    try:
        with torch.no_grad():
            torch.onnx.export(
                model, args, file, kwargs=kwargs, dynamic_shapes=shapes, dynamo=True, verbose=False, external_data=False
            )
    except Exception as error:
        raise _untraceable("torch.onnx.export", model, inputs, error) from error


def _call(model: nn.Module, inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and named arguments, and which of their dimensions may vary."""
    if getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # transformers would return objects, not tensors
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
    return args, kwargs, tree_map(_varying, kwargs or args)


def _varying(leaf: object) -> dict[int, Any] | None:
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim else None


def _untraceable(place: str, model: nn.Module, inputs: Tree, error: Exception) -> ConfigurationError:
    first: BaseException = error  # what the exporters wrap says what is wrong
    while first.__cause__ is not None:
        first = first.__cause__
    reason = next((line.strip() for line in str(first).splitlines() if line.strip()), type(first).__name__)
    return ConfigurationError(
        f"{place}: cannot trace {type(model).__name__} with {describe(inputs)}: {reason}; export its weights with "
        "--format safetensors"
    )
