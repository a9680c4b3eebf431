"""`pulsetrain checkpoint consolidate`: writes the weights of a checkpoint for other tools."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pulsetrain.cli.reports import OK
from pulsetrain.configuration.class_paths import look_in
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.engine.checkpoint import load_checkpoint, resolve, save_safetensors
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the weights and print where they are."""
    folder = resolve(arguments.checkpoint)
    weights = load_checkpoint(folder).get("model")
    if not isinstance(weights, Mapping) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise CheckpointError(f"{folder}: holds no weights of a torch module; load_checkpoint() reads what it holds")
    into: Path = arguments.pretrained or arguments.into or Path(f"{folder.name}.safetensors")
    if into.exists() and not arguments.force and not (into.is_dir() and not any(into.iterdir())):
        raise ConfigurationError(f"{into}: exists already; choose another with --into or --pretrained, or add --force")
    if arguments.pretrained is not None:
        _as_pretrained(Path(str(folder)).parent.parent, weights, into)
    else:
        save_safetensors(_holder(weights), into)
    print(f"{into}: {len(weights):,} tensors of {folder}")
    return OK


def _as_pretrained(run_folder: Path, weights: Mapping[str, Tensor], into: Path) -> None:
    """Make the run's model again, and let it write its weights and configuration."""
    file = run_folder / "config.yaml"
    if not file.is_file():
        raise ConfigurationError(
            f"{run_folder}: has no config.yaml from which the model could be made; in Python, use load_weights(model, "
            "path) and model.save_pretrained(folder)"
        )
    look_in(base_of(run_folder))
    model: Any = instantiate(read_config(file, {})["model"], "model")
    if not callable(getattr(model, "save_pretrained", None)):
        raise ConfigurationError(
            f"--pretrained: {type(model).__name__} has no save_pretrained(), so it is not of transformers; use --into"
        )
    model.load_state_dict(weights)
    model.save_pretrained(into)


def _holder(weights: Mapping[str, Tensor]) -> nn.Module:
    """A module whose state_dict has these tensors."""
    holder = nn.Module()
    for path, tensor in weights.items():
        place = holder
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.register_buffer(name, tensor)
    return holder
