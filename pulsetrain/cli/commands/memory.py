"""What `pulsetrain memory` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "estimate the memory that a configuration needs"
SYNOPSIS = "pulsetrain memory CONFIG [--measure] [--json] [--SECTION.SETTING VALUE ...]"
DESCRIPTION = """\
Estimate how much memory the training step of a configuration needs: by component, by phase
of the step, and the activations by module. The step runs over tensors without values, so
that a model can be estimated that is larger than this machine. Nothing is trained or
written. If it does not fit into the memory that the device has left, changes are listed
with the memory that they would need.

--measure also makes updates with values, and shows the count of the device's allocator.

Settings of the configuration can be overridden: --training.precision bf16
"""
EPILOG = """\
examples:
  pulsetrain memory config.yaml
  pulsetrain memory config.yaml --measure
  pulsetrain memory config.yaml --data.init_args.batch_size 64 --training.activation_checkpointing 'blocks.*'

exit status: 0 it fits, or what the device has left is not known; 1 it does not fit; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration file, in YAML")
    parser.add_argument("--measure", action="store_true", help="also make updates, and measure them")
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
