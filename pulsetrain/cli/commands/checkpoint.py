"""What `pulsetrain checkpoint` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.averages_option import add_averages

__all__ = ["add_arguments"]

HELP = "write the weights of a checkpoint for other tools"
DESCRIPTION = """\
Write the weights of a checkpoint into one safetensors file, or, for a model of
transformers, into a folder that from_pretrained() loads. A run folder means its latest
checkpoint; RUN/best means the best one. The weights are those that the run validated with:
where EMA or SWA averaged them, the averages.
"""
EPILOG = """\
examples:
  pulsetrain checkpoint consolidate runs/a
  pulsetrain checkpoint consolidate runs/a/best --into model.safetensors
  pulsetrain checkpoint consolidate runs/a --pretrained models/a

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("action", choices=("consolidate",), help="what to do")
    parser.add_argument("checkpoint", metavar="RUN", type=Path, help="a run folder, or a checkpoint in it")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--into", metavar="FILE", type=Path, help="the safetensors file [CHECKPOINT.safetensors]")
    target.add_argument("--pretrained", metavar="FOLDER", type=Path, help="a folder for from_pretrained() instead")
    add_averages(parser)
    parser.add_argument("--force", action="store_true", help="replace what is there")
