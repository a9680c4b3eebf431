"""Tables in a document that are written from saved reports, so that nobody types a figure.

A block of a document begins with a comment that names its benchmark, and optionally some of its rows:

    <!-- benchmark: trainers; rows: ours | ignite -->
    ...
    <!-- end -->

What is between the two comments is replaced by the command, the date, the machine, and the table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.results import Report, table

__all__ = ["Block", "blocks_of", "load_reports", "save_report", "written"]

BLOCK = re.compile(
    r"<!-- benchmark: (?P<name>\w+)(?:; rows: (?P<rows>[^\n]*?))? -->\n(?P<body>.*?)<!-- end -->", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A table in a document."""

    benchmark: str
    rows: list[str] | None  # None: all of them
    body: str

    @property
    def command(self) -> list[str] | None:
        """The command that measured it; None if the block is still empty."""
        found = re.search(r"`(python -m benchmarks [^`]+)`", self.body)
        return shlex.split(found[1]) if found else None


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a document."""
    for found in BLOCK.finditer(text):
        yield _block(found)


def written(text: str, reports: Mapping[str, Report]) -> str:
    """The document with the tables of these reports; blocks of other benchmarks stay as they are."""

    def replaced(found: re.Match[str]) -> str:
        report = reports.get(found["name"])
        if report is None:
            return found[0]
        begin = found[0].partition("\n")[0]
        return f"{begin}\n{_rendered(report, _block(found).rows)}<!-- end -->"

    return BLOCK.sub(replaced, text)


def save_report(folder: Path, report: Report) -> None:
    """Keep a report, in place of an earlier one of the same benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{report.benchmark}.json").write_text(report.to_json() + "\n", encoding="utf-8")


def load_reports(folder: Path) -> dict[str, Report]:
    """The kept reports by benchmark."""
    reports = (Report.from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return {report.benchmark: report for report in reports}


def _block(found: re.Match[str]) -> Block:
    rows = [name.strip() for name in found["rows"].split("|")] if found["rows"] else None
    return Block(benchmark=found["name"], rows=rows, body=found["body"])


def _rendered(report: Report, rows: list[str] | None) -> str:
    return f"`{report.command}`, {report.date}, {report.machine}:\n\n```\n{table(report, rows)}\n```\n"
