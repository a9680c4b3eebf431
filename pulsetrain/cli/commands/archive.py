"""What `pulsetrain archive` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "write a run as one file"
DESCRIPTION = """\
Write a run as one file, RUN.run.zip: its log, configuration, metrics, pictures, and its
best checkpoint. `diff`, `events`, `export`, `replay`, `report`, `verify`, `watch` and
`where` read it like the folder; with --unpack it becomes a run folder again. The run is
only read, and what was written is compared with it. Credentials are replaced or left
out, which is reported.
"""
EPILOG = """\
examples:
  pulsetrain archive runs/a
  pulsetrain archive runs/a runs/b --into archive --checkpoints all
  pulsetrain report a.run.zip
  pulsetrain archive a.run.zip --unpack --into runs

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; with --unpack, an archive")
    parser.add_argument(
        "--into", metavar="FOLDER", type=Path, default=Path(), help="where it is written, made if missing [.]"
    )
    parser.add_argument(
        "--checkpoints", choices=("none", "best", "latest", "all"), default="best", help="which ones go in [best]"
    )
    parser.add_argument("--unpack", action="store_true", help="make run folders of archives")
    parser.add_argument("--force", action="store_true", help="overwrite existing archives")
