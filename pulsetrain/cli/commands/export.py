"""What `pulsetrain export` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.averages_option import add_averages
from pulsetrain.cli.commands.rank_option import add_rank

__all__ = ["ENDINGS", "OF_MODELS", "add_arguments"]

OF_MODELS = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
ENDINGS = {"perfetto": ".perfetto.json.gz", "tensorboard": ".tensorboard", "csv": ".csv", **OF_MODELS}
ARCHIVES = ("folder",)
HELP = "write a recorded run or its model for other tools"
DESCRIPTION = """\
Write a recorded run in a format that other tools read:
  perfetto     a trace for ui.perfetto.dev and chrome://tracing: engines as tracks; runs,
               epochs, iterations, validations and checkpoints as slices; losses, learning
               rate and gradient norm as counters; compressed where PATH ends with .gz
  tensorboard  a folder for tensorboard --logdir: every scalar at its iteration
  csv          a row for each event that has numbers, a column for each number
or the model of a checkpoint, of the run's latest one where RUN is a run folder:
  safetensors  its weights; adapters are merged into the weights that they adapt
  torch_export a program for torch.export.load(), which needs neither the model's code nor
               the run; traced with the first batch of the training data
  onnx         the same for runtimes of ONNX; pip install 'pulsetrain[onnx]'
The weights are those that the run validated with: where EMA or SWA averaged them, the
averages. For the last two formats, and for adapters, the model is made from the run's
config.yaml. The run's folder is only read.
"""
EPILOG = """\
examples:
  pulsetrain export runs/a --format perfetto
  pulsetrain export runs/a --format csv --into a.csv --force
  pulsetrain export runs/b --format perfetto --rank 1
  pulsetrain export runs/a/best --format torch_export --into model.pt2

exit status: 0 done; 2 wrong input; 3 the log is damaged, and its readable part was exported
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder; for a model, also a checkpoint in it")
    add_rank(parser)
    parser.add_argument("--format", choices=tuple(ENDINGS), required=True, help="the format")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PATH",
        help="a file, or a folder for tensorboard; by default in this folder, named after the run or checkpoint",
    )
    add_averages(parser)
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
