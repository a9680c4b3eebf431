"""`pulsetrain export --format safetensors|torch_export|onnx`: writes the model of a checkpoint for other tools."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pulsetrain.cli.checkpoint import holder_of, weights_of
from pulsetrain.cli.commands.export import ENDINGS
from pulsetrain.cli.reports import OK
from pulsetrain.cli.results import logs_on_stderr
from pulsetrain.cli.targets import check_target, replacing
from pulsetrain.configuration.trained_model import example_inputs, run_holding, trained_model
from pulsetrain.engine.checkpoint import Location, load_checkpoint, resolve, save_safetensors
from pulsetrain.engine.checkpoint.frozen import left_out_of
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording.log.files import NamedPath
from pulsetrain.export.models import merged, write_onnx, write_program

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the model and print where it is."""
    form = arguments.format
    if arguments.rank:
        raise ConfigurationError(f"--rank {arguments.rank}: chooses a log, and {form} is of a checkpoint; leave it out")
    run: str | os.PathLike[str] = arguments.folder
    folder = resolve(Path(run))
    into: Path = arguments.into if arguments.into is not None else Path(folder.name + ENDINGS[form])
    check_target(into, run_holding(folder), form, arguments.force)
    with logs_on_stderr(), replacing(into) as partial:
        if form == "safetensors":
            written = _write_weights(folder, partial, arguments.averages)
        else:
            written = _write_program(folder, partial, form, arguments.averages)
    print(f"{into}: {written} of {f'{folder.name} of {run}' if isinstance(run, NamedPath) else folder}")
    return OK


def _write_weights(folder: Location, file: Path, averages: bool) -> str:
    state = load_checkpoint(folder)
    if left_out_of(state) is None:
        weights = weights_of(folder, state, averages)
        save_safetensors(holder_of(weights), file)
        return f"{len(weights):,} tensors"
    model = merged(
        trained_model(folder, averages=averages)
    )  # the checkpoint alone has adapters without what they adapt
    save_safetensors(model, file)
    return f"{len(model.state_dict()):,} tensors, adapters merged,"


def _write_program(folder: Location, file: Path, form: str, averages: bool) -> str:
    model = trained_model(folder, averages=averages)
    inputs = example_inputs(folder, model)
    model = merged(model).eval()
    write = write_program if form == "torch_export" else write_onnx
    write(model, inputs, file)
    return type(model).__name__
