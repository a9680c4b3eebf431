"""Runs the named benchmarks, or all, and compares them with their bounds.

    python -m benchmarks                                  # all tables, some of smaller runs; 1 if a bound is missed
    python -m benchmarks trainers --only ours ignite      # one of them, with its own options
    python -m benchmarks --full scale                     # with the sizes for which a figure is promised
    python -m benchmarks --check                          # only the rows with bounds, with the sizes of the bounds
    python -m benchmarks --check --short                  # only ratios, with slack: on any machine, within 90 seconds
    python -m benchmarks --write docs/performance.md      # its tables, from the last results

Exit status: 0 all bounds hold; 1 one is missed, or a benchmark failed; 2 wrong input; 3 none is missed, but some
absolute times do not count, since the machine was busy, or exceed their bounds on one slower than those were set on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.check import check, summary
from benchmarks.harness.plan import SHORT, arguments_of, names
from benchmarks.harness.results import MISSED, UNBOUNDED, status, table
from benchmarks.harness.run import Outcome, run
from benchmarks.harness.tables import load_reports, save_report, written

RESULTS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--check", action="store_true", help="compare the rows with their bounds")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--short", dest="form", action="store_const", const="short", default="", help="with slack")
    forms.add_argument("--full", dest="form", action="store_const", const="full", help="with the promised sizes")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of results [%(default)s]")
    parser.add_argument("--write", type=Path, nargs="+", metavar="FILE", help="documents whose tables to rewrite")
    options, own = parser.parse_known_args(arguments)
    unknown = [name for name in options.names if name not in names()]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(names())}")
    if own and len(options.names) != 1:
        parser.error(f"{own[0]}: options of a benchmark need its name, and no other one")
    if options.form == "short" and not options.check:
        parser.error("--short: is a form of --check")
    if options.write:
        return _write(options.write, options.results)
    form = options.form or ("check" if options.check else "" if options.names else "all")
    chosen = options.names or [name for name in names() if options.form != "short" or name in SHORT]
    plan = [(name, [*arguments_of(name, form), *own]) for name in chosen]
    measured = partial(_measured, folder=None if options.form == "short" else options.results)
    if options.check:
        short = options.form == "short"
        text, code = summary(check(plan, measured, short=short, show=partial(print, flush=True)), short=short)
        print(text, file=sys.stderr if code else sys.stdout)
        return code
    return _tables(plan, measured)


def _measured(name: str, arguments: Sequence[str], folder: Path | None) -> Outcome:
    outcome = run(name, arguments)
    if outcome.report is not None and folder is not None:
        save_report(folder, outcome.report)
    return outcome


def _tables(plan: Sequence[tuple[str, Sequence[str]]], measured: partial[Outcome]) -> int:
    verdicts, begun = [], time.monotonic()
    for name, arguments in plan:
        outcome = measured(name, arguments)
        if outcome.report is None:
            verdicts.append(MISSED if outcome.status else UNBOUNDED)
            text = f"exit status {outcome.status}\n{outcome.output}{outcome.errors}".rstrip()
        else:
            verdicts += [verdict for _, verdict in outcome.report.verdicts()]
            text = table(outcome.report)
        print(f"== {name}\n{text}\n", flush=True)
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    if len(plan) > 1:
        print(f"{len(plan)} benchmarks in {minutes} min {seconds:02} s")
    return status(verdicts)


def _write(documents: Sequence[Path], folder: Path) -> int:
    reports = load_reports(folder)
    if not reports:
        print(f"benchmarks: {folder} has no results; run a benchmark first", file=sys.stderr)
        return 2
    for path in documents:
        text = path.read_text(encoding="utf-8")
        path.write_text(written(text, reports), encoding="utf-8")
        print(f"{path}: the tables of {', '.join(reports)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
