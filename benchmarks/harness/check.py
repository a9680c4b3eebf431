"""Compares the rows of benchmarks with their bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.machine import BOUNDS_REFERENCE_MS
from benchmarks.harness.results import HOLDS, MISSED, NOT_MEASURED, Report, Row, number, status
from benchmarks.harness.run import Outcome

__all__ = ["SLACK", "Finding", "check", "summary"]

SLACK = 1.5  # times its bound that a ratio may be in the short form, which also runs on busy machines

Run = Callable[[str, Sequence[str]], Outcome]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row with its verdict, or a benchmark that failed: then `row` is empty."""

    benchmark: str
    row: str
    text: str
    verdict: str
    goal: str = ""  # see Row.open_goal


def check(
    chosen: Sequence[tuple[str, Sequence[str]]], run: Run, *, short: bool, show: Callable[[str], object]
) -> list[Finding]:
    """Run each benchmark, and compare every row that has a bound.

    A benchmark that misses a bound runs again before that is reported. In the short form, which compares ratios alone,
    with slack, it runs once more, and a row is missed if both runs miss it. Otherwise it runs twice more, and a row has
    the verdict of most of its three measurements; if all three differ, it is missed.

    Args:
        chosen: the benchmarks with their options.
        run: runs one.
        short: whether this is the short form.
        show: gets the text about each benchmark when it has ended.
    """
    found: list[Finding] = []
    for name, arguments in chosen:
        first = _findings(run(name, arguments), short)
        if any(each.verdict == MISSED and (short or each.row) for each in first):
            show(f"{name}: a bound is missed; measuring again")
            second = _findings(run(name, arguments), short)
            first = _better(first, second) if short else _most(first, second, _findings(run(name, arguments), short))
        show("\n".join(f"{each.verdict:<14}{each.benchmark}: {each.text}" for each in first) or f"{name}: no bounds")
        found += first
    return found


def summary(found: Sequence[Finding], *, short: bool) -> tuple[str, int]:
    """What to print at the end, and the exit status: see `status`; the short form leaves absolute times out."""
    verdicts = [each.verdict for each in found]
    words = {HOLDS: "hold", MISSED: "missed", NOT_MEASURED: "not measured"}
    counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in words.items() if verdict in verdicts]
    lines = [f"{MISSED}: {each.benchmark}: {each.text}" for each in found if each.verdict == MISSED]
    lines += [f"{each.goal}: {each.benchmark}: {each.row}" for each in found if each.goal]
    lines.append(f"bounds: {', '.join(counts) or 'none compared'}")
    if NOT_MEASURED in verdicts and not short:
        lines.append(
            "Absolute times count only on an idle machine, and can be missed only on one whose reference loop takes"
            f" at most {BOUNDS_REFERENCE_MS} ms."
        )
    code = status(verdicts)
    return "\n".join(lines), 0 if short and code == 3 else code


def _findings(outcome: Outcome, short: bool) -> list[Finding]:
    found = outcome.report
    if found is None:
        said = (outcome.errors.strip() or outcome.output.strip() or "no output").splitlines()[-1]
        text = f"exit status {outcome.status}, no rows: {said}"
        return [Finding(benchmark=outcome.name, row="", text=text, verdict=MISSED if outcome.status else HOLDS)]
    slack = SLACK if short else 1.0
    return [
        Finding(
            benchmark=outcome.name,
            row=row.name,
            text=_compared(row, found, slack),
            verdict=verdict,
            goal=row.open_goal(found.load),
        )
        for row, verdict in found.verdicts(slack)
        if (row.bound is not None or row.goal is not None) and (row.kind == "ratio" or not short)
    ]


def _compared(row: Row, found: Report, slack: float) -> str:
    """Both figures, and beside an absolute one the load."""
    unit = f" {row.unit}" if row.unit else ""
    by = f" with {slack:g} times slack" if slack != 1 else ""
    load = f"; {found.load}" if row.kind == "absolute" else ""
    bound = f"bound {row.limit}{unit}{by}" if row.bound is not None else "no bound"
    return f"{row.name}: measured {number(row.measured)}{unit}, {bound}{load}"


def _better(first: Sequence[Finding], second: Sequence[Finding]) -> list[Finding]:
    """Of each row the measurement whose bound holds, otherwise the second."""
    held = {each.row: each for each in first if each.verdict == HOLDS}
    return [held.get(each.row, each) if each.verdict == MISSED else each for each in second]


def _most(*runs: Sequence[Finding]) -> list[Finding]:
    """Of each row the last measurement with the verdict of most of them, or that it is missed if all differ."""
    chosen = []
    for row in dict.fromkeys(each.row for run in runs for each in run):
        found = [each for run in runs for each in run if each.row == row]
        verdict, times = Counter(each.verdict for each in found).most_common(1)[0]
        if times == 1:
            verdict = MISSED
        last = next((each for each in reversed(found) if each.verdict == verdict), found[-1])
        missed = [each.text for each in found if each.verdict == MISSED]
        text = f"{last.text} ({verdict} in {times} of {len(found)} measurements)" if missed else last.text
        chosen.append(replace(last, verdict=verdict, text=text))
    return chosen
