"""What `pulsetrain debug` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.commands.rank_option import add_rank

__all__ = ["add_arguments"]

HELP = "step through a recorded run, forward and back"
DESCRIPTION = """\
Step through a recorded run, forward and back, with breakpoints and watched values.
If the run ended in an exception or with a loss that is NaN, the debugger opens just
before that and reports what happened; otherwise it opens at the start. `help` lists the
commands. From a pipe, each line is a command. The run's folder is only read.
For a crash bundle, written by the handler CrashBundle, there are also the commands
`traceback`, `batch` and `norms`.
"""
EPILOG = """\
examples:
  pulsetrain debug runs/a
  pulsetrain debug runs/a/crash/iteration-000048210
  pulsetrain debug runs/a --live --at 48210
  pulsetrain debug runs/b --rank 1
  printf 'break on validation_completed if metrics["val/loss"] > 3\\ncontinue\\nstate\\n' | pulsetrain debug runs/a

exit status: 0 done; 2 wrong input, or a command from a pipe that failed; 3 the log is damaged
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder, or a crash bundle: RUN/crash/NAME")
    parser.add_argument("--engine", help="the engine to follow; by default the trainer")
    add_rank(parser)
    parser.add_argument(
        "--live",
        action="store_true",
        help="rebuild the trainer from the run's config.yaml, at the checkpoint before --at, and compute",
    )
    parser.add_argument(
        "--at", metavar="ITERATION", type=int, help="with --live: where to start; by default where something went wrong"
    )
