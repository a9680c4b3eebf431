"""What `pulsetrain serve` accepts, and its help."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_arguments"]

HELP = "show the runs in a folder as a live web page"
DESCRIPTION = """\
Show the runs below a folder as a page in the browser: a list that can be searched,
curves that grow while runs train, a timeline, events, differences of runs, what early
stopping or the spike guard would have done, pictures, and where a run hangs.

The page is only for this machine unless --host says otherwise; then a token is needed,
which is in the address that is printed. Runs are only read. Ctrl-C ends it.
"""
EPILOG = """\
examples:
  pulsetrain serve
  pulsetrain serve /data/runs --port 9000
  ssh -L 8765:localhost:8765 HOST pulsetrain serve /data/runs

exit status: 0 done; 2 wrong input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what follows the command."""
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="where the runs are [runs, or .]")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8765, help="0 for any that is free [8765]")
    parser.add_argument("--token", help="what the browser has to know [made if others can connect]")
