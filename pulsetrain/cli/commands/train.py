"""What `pulsetrain train` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.configuration.sections import SECTIONS

__all__ = ["add_arguments"]

HELP = "train a run from a configuration file"
SYNOPSIS = (
    "pulsetrain train CONFIG [--run FOLDER] [--resume latest|CHECKPOINT] [--wait] [--dry-run]\n"
    "                        [--launch.nproc N] "
    "[--SECTION.SETTING VALUE ...]"
)
DESCRIPTION = f"""\
Train a run from a configuration file: YAML with the sections
{", ".join(SECTIONS)}.
model and data are required; the others have defaults.

Settings of the file can be overridden, by their dotted name, with a value in YAML:
  --training.learning_rate 3e-4        --model.init_args.width 64
  --training.validate_every '{{updates: 20}}'        (replaces the mapping)
  --training.validate_every.updates 20             (changes one key of it)

--launch.nproc N trains in N processes on this machine, which divide each batch. If one
is killed, they start again from the newest checkpoint: as many as before or, if they fail
again before the next one, fewer, but at least --launch.min_nproc (by default N).

Ctrl-C, SIGTERM and SIGUSR1 (in a Slurm job SIGUSR2, too) stop the run at the next safe
point with a checkpoint, and print the command that resumes it. Ctrl-C after any of these
stops it immediately, and so does SIGTERM 2 seconds or more after the first Ctrl-C or
SIGTERM.
"""
EPILOG = """\
examples:
  pulsetrain train config.yaml
  pulsetrain train config.yaml --run runs/wide --model.init_args.width 256
  pulsetrain train config.yaml --resume latest
  pulsetrain train config.yaml --dry-run
  pulsetrain train config.yaml --launch.nproc 2

exit status: 0 done; 1 the run failed; 2 wrong input; 4 trained, but the last checkpoint
could not be saved; 128 + n stopped by signal n
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration file, in YAML")
    parser.add_argument(
        "--run",
        "--folder",  # torchrun takes --run for an option of its own
        dest="folder",
        metavar="FOLDER",
        help="the run folder, instead of the configuration's; '{n}' in it is the next free number",
    )
    parser.add_argument(
        "--resume",
        metavar="latest|CHECKPOINT",
        help="resume from the newest checkpoint of the run folder, or of the last numbered one (or start, where there "
        "is none yet); or from the checkpoint with this path or URL",
    )
    parser.add_argument("--wait", action="store_true", help="wait while another process owns the run folder")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try two batches of training, validation, handlers and a checkpoint; keep nothing",
    )
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
