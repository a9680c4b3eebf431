"""`pulsetrain checkpoint consolidate`: writes the weights of a checkpoint for other tools."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pulsetrain.cli.reports import OK
from pulsetrain.cli.results import logs_on_stderr
from pulsetrain.configuration.trained_model import trained_model
from pulsetrain.engine.checkpoint import Location, load_checkpoint, resolve, save_safetensors
from pulsetrain.engine.checkpoint.validated import validated_weights
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["holder_of", "run", "weights_of"]


def run(arguments: argparse.Namespace) -> int:
    """Write the weights and print where they are."""
    folder = resolve(arguments.checkpoint)
    state = load_checkpoint(folder)
    count = len(weights_of(folder, state, averages=False))
    into: Path = arguments.pretrained or arguments.into or Path(f"{folder.name}.safetensors")
    if into.exists() and not arguments.force and not (into.is_dir() and not any(into.iterdir())):
        raise ConfigurationError(f"{into}: exists already; choose another with --into or --pretrained, or add --force")
    with logs_on_stderr():
        if arguments.pretrained is not None:
            _as_pretrained(folder, into, arguments.averages)
        else:
            save_safetensors(holder_of(weights_of(folder, state, arguments.averages)), into)
    print(f"{into}: {count:,} tensors of {folder}")
    return OK


def weights_of(folder: Location, state: Mapping[str, Any], averages: bool) -> Mapping[str, Tensor]:
    """The model's weights in the state of a checkpoint: those that its run validated with, unless without averages.

    Raises:
        CheckpointError: it has none; or as `validated_weights`.
    """
    weights = state.get("model")
    if not isinstance(weights, Mapping) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise CheckpointError(f"{folder}: holds no weights of a torch module; load_checkpoint() reads what it holds")
    return validated_weights(state, str(folder)) if averages else weights


def holder_of(weights: Mapping[str, Tensor]) -> nn.Module:
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


def _as_pretrained(folder: Location, into: Path, averages: bool) -> None:
    """Make the run's model again, and let it write its weights and configuration."""
    model: Any = trained_model(folder, averages=averages)
    if not callable(getattr(model, "save_pretrained", None)):
        raise ConfigurationError(
            f"--pretrained: {type(model).__name__} has no save_pretrained(), so it is not of transformers; use --into"
        )
    model.save_pretrained(into)
