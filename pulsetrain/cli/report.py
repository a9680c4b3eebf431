"""`pulsetrain report`: writes a page about recorded runs, for a browser."""

from __future__ import annotations

import argparse

from pulsetrain.cli.reports import report_damage
from pulsetrain.engine.plain_text import format_count, plain
from pulsetrain.report import write_report

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path, and damaged parts on standard error."""
    written = write_report(arguments.runs, arguments.into, force=arguments.force)
    counts = [format_count(len(arguments.runs), "run"), format_count(written.curves, "curve")]
    print(f"{plain(str(written.path))}: {', '.join(counts)}, {written.bytes / 1e6:.1f} MB")
    return report_damage(written.damage)
