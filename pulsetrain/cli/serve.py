"""`pulsetrain serve`: shows the runs below a folder as a page in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from pulsetrain.cli.reports import OK
from pulsetrain.engine.plain_text import plain
from pulsetrain.serve.server import Address, serve

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C; returns the exit status."""
    root = arguments.folder or (Path("runs") if Path("runs").is_dir() else Path())

    def started(address: Address) -> None:
        print(f"{plain(str(root))}: {address.url}\nCtrl-C ends it", flush=True)

    try:
        serve(root, host=arguments.host, port=arguments.port, token=arguments.token, on_start=started)
    except KeyboardInterrupt:
        print()
    return OK
