"""`pulsetrain bisect`: finds the setting or the commit that makes a run worse."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pulsetrain.bisect.commits import Commit, commit_of, commits_between, notes_of, repository_of, train_commit
from pulsetrain.bisect.search import Verdict, causes, first_bad
from pulsetrain.bisect.trials import Pair, Trial, Trials, read_pair
from pulsetrain.cli.interrupts import sigterm_interrupts
from pulsetrain.cli.reports import FAILED, OK, STOPPED, report_damage, until_closed
from pulsetrain.engine.argument_checks import check_number, check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.plain_text import format_count, plain
from pulsetrain.engine.recording.log.non_finite import finite_or_text

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Search, and print the answer with its runs; returns the exit status."""
    check_number("pulsetrain bisect", "noise", arguments.noise)
    if arguments.iterations is not None:
        check_whole_number("pulsetrain bisect", "iterations", arguments.iterations)
    pair = read_pair(arguments.good, arguments.bad, arguments.metric, arguments.mode)
    if not arguments.git and not pair.changes:
        raise ConfigurationError(
            f"{pair.good} and {pair.bad} have the same settings; --git compares their commits, `pulsetrain diff` events"
        )
    report_damage(pair.damage)
    repository = repository_of(pair) if arguments.git else None
    commits = commits_between(pair, repository) if repository is not None else []
    start = 0 if arguments.git else pair.start
    until = start + (arguments.iterations or max(pair.length - start, 1))
    if not arguments.git:  # which trains by the code of commits
        pair.check_recorded(until, arguments.noise)
    bad = pair.bad if pair.bad.name not in ("", "..") else pair.bad.resolve()
    into = arguments.into or bad.with_name(f"{bad.name}-bisect")
    try:
        with sigterm_interrupts(), Trials(pair, into, until, arguments.noise, _show) as trials:
            where = f"from iteration {start:,} of {pair.good}" if start else "from the beginning"
            print(f"{pair.metric} of short runs {where} to {until:,}, in {into}", file=sys.stderr)
            counts = [f"{each} process{'es' * (each != 1)}" for each in pair.processes]
            if counts[0] != counts[1] and repository is None:
                trained = f"{pair.good} was trained by {counts[0]}, {pair.bad} by {counts[1]}"
                print(f"pulsetrain: {trained}; every run here has as many as {pair.good}", file=sys.stderr)
            answer = _commits(trials, repository, commits) if repository is not None else _settings(trials)
    except KeyboardInterrupt:
        print(f"\npulsetrain: stopped; the same command continues in {into}", file=sys.stderr)
        return STOPPED
    with until_closed():
        if arguments.format == "json":
            runs = [{"run": str(each.folder), **_row(each)} for each in trials.all]
            found = {"metric": pair.metric, "start": start, "until": until, **answer, "runs": runs}
            print(json.dumps(found, allow_nan=False))
        else:
            print(_table(trials.all, pair))
            print("\n".join(plain(line, keep="\n") for line in answer["text"]))
    return OK if answer["causes"] else FAILED


def _settings(trials: Trials) -> dict[str, Any]:
    trials.controls()
    pair = trials.pair
    found = causes(pair.changes, trials.check)
    text = []
    for cause in found:
        together, value = "" if len(cause) == 1 else " only together", trials.trial_of(cause).value
        text.append(f"\n{pair.metric} is {_number(value)} instead of {_number(trials.all[0].value)}{together} with")
        text += [f"  {each}" for each in cause]
    left = [each for each in pair.changes if not any(each in cause for cause in found)]
    if left and found:
        trials.check(left)
        rest = trials.trial_of(left)
        those = f"the other {len(left)} settings" if len(left) > 1 else "the other setting"
        ends = f"failed: {rest.error}" if rest.error else f"gives {_number(rest.value)}"
        text.append(f"without that, {those} {ends if len(left) == 1 else ends.replace('gives', 'give')}")
    return {"causes": [[each.name for each in cause] for cause in found], "text": text + _failures(trials)}


def _commits(trials: Trials, repository: Path, commits: Sequence[Commit]) -> dict[str, Any]:
    pair, good = trials.pair, commit_of(trials.pair.good)
    for note in notes_of(pair):
        print(f"pulsetrain: {note}", file=sys.stderr)
    known = {each.hash: each for each in commits}

    def check(commit: str) -> Verdict:
        subject = known[commit].subject if commit in known else f"the commit of {pair.good}"
        what = f"{commit[:12]} {subject}"
        return trials.add(commit[:12], what, lambda folder: train_commit(trials, repository, commit, folder))

    trials.controls_of(check, (good, commits[-1].hash))
    suspects, unresolved = first_bad({each.hash: each.parents for each in commits}, check)
    text = [
        f"\nthe first commit with a worse {pair.metric}:" if len(suspects) == 1 else "\nit is one of these commits:"
    ]
    for commit in suspects:
        text.append(f"  {commit[:12]} {known[commit].subject}")
        for merged in known[commit].merged:
            text.append(
                f"    it merges commits without {good[:12]}, which were not trained: git log {good[:12]}..{merged[:12]}"
            )
    if unresolved:
        text.append(f"{format_count(len(unresolved), 'commit')} before it cannot be trained")
    return {"causes": [suspects] if len(suspects) == 1 else [], "suspects": suspects, "text": text + _failures(trials)}


def _failures(trials: Trials) -> list[str]:
    failed = [each for each in trials.all if each.error]
    return [f"{format_count(len(failed), 'run')} failed, which may hide a cause:"] * bool(failed) + [
        f"  {each.what}: {each.error}" for each in failed
    ]


def _show(trial: Trial) -> None:
    judged = f"{_number(trial.value)} at iteration {_at(trial)}, {trial.verdict.value}"
    value = trial.error if trial.error else judged
    print(plain(f"{trial.name}: {value}  ({trial.what})"), file=sys.stderr, flush=True)


def _row(trial: Trial) -> dict[str, Any]:
    verdict = {"iteration": trial.iteration, "verdict": trial.verdict.value, "error": trial.error}
    value = None if trial.value is None else finite_or_text(trial.value)
    return {"settings": trial.what, "value": value, **verdict}


def _table(trials: Sequence[Trial], pair: Pair) -> str:
    lines = [("run", pair.metric, "", "iteration", "what it has of the worse run")]
    for each in trials:
        lines.append((str(each.folder), _number(each.value), each.verdict.value, _at(each), each.what))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(plain("  ".join(map(str.ljust, line, widths)).rstrip()) for line in lines)


def _at(trial: Trial) -> str:
    return "-" if trial.iteration is None else f"{trial.iteration:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
