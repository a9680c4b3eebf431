"""Conditions on runs as text, such as 'best["val/loss"] < 2 and training.learning_rate > 1e-3'."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from pulsetrain.engine.errors import ConfigurationError, did_you_mean
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.predicate import Predicate, UnsupportedError, Value, predicate
from pulsetrain.familiar_names import familiar_setting
from pulsetrain.runs.progress import Progress
from pulsetrain.runs.summary import RunSummary, Status, names_of_settings

__all__ = ["NAMES", "run_predicate", "select_runs"]

NAMES = (
    "name", "status", "reason", "epoch", "iteration", "progress", "total_epochs", "total_iterations", "started",
    "updated", "last", "best", "tags", "parent", "ranks", "id",
)  # fmt: skip
"""The names of a condition besides settings."""


def run_predicate(text: str, runs: Iterable[RunSummary]) -> Predicate:
    """Compile a condition on runs, in the language of conditions on events.

    >>> some = RunSummary(
    ...     b"runs/a", "", Status.COMPLETED, "", Progress(2, 20, 2, 2), None, None, {}, {"val/loss": 1.5},
    ...     {"training.learning_rate": 0.01}, ("good",), None, 1,
    ... )
    >>> good = run_predicate('best["val/loss"] < 2 and training.learning_rate > 1e-3 and "good" in tags', [some])
    >>> good(some)
    True

    Args:
        text: the condition. Its names are NAMES, and the settings of the runs by their dotted names.
        runs: whose settings may be named.

    Raises:
        ConfigurationError: the text is not such a condition, or no run has a setting or a metric that it names.
    """
    runs = list(runs)
    settings = names_of_settings(runs)

    def read(node: ast.Name | ast.Attribute) -> Value:
        name = ast.unparse(node)
        if name in settings:
            return lambda run: parse_non_finite(run.setting(name))
        if name in NAMES:
            return lambda run: _plain(getattr(run, name))
        near, meant = did_you_mean(name, (*settings, *NAMES)), familiar_setting(name)
        if meant in settings and (name.startswith("training.") or not near):  # else `epochs` would be max_epochs
            near = f"; did you mean {meant!r}?"
        elif meant is None and (metric := _metric_of(name, runs)):
            of = "best" if any(metric in run.best for run in runs) else "last"
            near = f'; a metric is written as {of}["{metric}"]'
        elif name == "run":  # as its column is called
            near = "; did you mean 'name'?"
        rule = near or f"; besides settings there are {', '.join(NAMES)}"
        raise UnsupportedError(node, f"no run has {name!r}{rule}")

    condition = predicate(text, read, _NOTHING)
    _check_constants(text, runs)
    return condition


def _metric_of(name: str, runs: Iterable[RunSummary]) -> str | None:
    """A metric of the runs that has this name as a part, such as "val/loss" of "loss"."""
    return next((each for run in runs for each in (*run.best, *run.last) if name in each.split("/")), None)


def _check_constants(text: str, runs: list[RunSummary]) -> None:
    """Refuse metrics that no run has, statuses that there are not, and one tag in place of the list of them.

    Such a condition would select nothing.
    """
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Subscript(ast.Name("best" | "last" as of), ast.Constant(str(name))):
                known = dict.fromkeys(each for run in runs for each in getattr(run, of))
                if name not in known and any(run.best or run.last for run in runs):
                    has = f"no run has a {'best' if of == 'best' else 'newest'} value of {name!r}"
                    hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
                    raise ConfigurationError(f"--where {text!r}: {has}{hint}")
            case ast.Compare(ast.Name("status"), [_], [compared]):
                states = [each.value for each in Status]
                names = [each.value for each in ast.walk(compared) if isinstance(each, ast.Constant)]
                if wrong := [str(each) for each in names if each not in states]:
                    hint = did_you_mean(wrong[0], states) or f"; choose one of {', '.join(states)}"
                    raise ConfigurationError(f"--where {text!r}: no run has the status {wrong[0]!r}{hint}")
            case ast.Compare(ast.Name("tags"), [ast.Eq() | ast.NotEq()], [ast.Constant(str(name))]):
                raise ConfigurationError(f"--where {text!r}: tags is a list; write {name!r} in tags")


def select_runs(runs: list[RunSummary], where: str | None) -> list[RunSummary]:
    """The runs for which a condition is true; all if there is none.

    Raises:
        ConfigurationError: it is not a condition, or cannot be computed for any run.
    """
    if where is None:
        return runs
    condition = run_predicate(where, runs)
    chosen = [each for each in runs if condition(each)]
    if condition.failure is not None:
        rule = f"cannot be computed for any run: {condition.failure}; correct the condition"
        raise ConfigurationError(f"--where {where!r}: {rule}")
    return chosen


def _plain(value: object) -> object:
    if isinstance(value, Status):
        return value.value
    return list(value) if isinstance(value, tuple) else value


_NOTHING = RunSummary(b"", "", Status.RUNNING, "", Progress(), None, None, {}, {}, {}, (), None, 1)
