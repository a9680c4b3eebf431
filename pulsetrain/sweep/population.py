"""Population-based training (Jaderberg et al. 2017): the worst quarter continues as forks of the best quarter.

Trial `generation * size + member` trains one member for one interval. From the second generation on it is a fork of a
trial of the generation before: its own, or for the worst quarter one of the best quarter's, with perturbed settings.
Everything follows from the seed and the values of the generation before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.sweep.spec import Range, Spec

__all__ = ["has_completed", "lineage_of", "parent_of", "place_of", "values_of"]

FACTORS = (0.8, 1.25)  # by which a setting is perturbed


def place_of(spec: Spec, number: int) -> tuple[int, int]:
    """The generation and the member of a trial."""
    return divmod(number, spec.population)


def has_completed(trial: Any) -> bool:
    """Whether one of Optuna's trials has a value."""
    return trial.state.name == "COMPLETE" and not math.isnan(trial.values[0])


def parent_of(spec: Spec, number: int, trials: Sequence[Any]) -> int | None:
    """The trial that this one is forked from; None in the first generation.

    Args:
        spec: the sweep.
        number: of the trial.
        trials: Optuna's; the generation before has ended, and one of its members has completed.
    """
    generation, member = place_of(spec, number)
    if generation == 0:
        return None
    first = (generation - 1) * spec.population
    sign = 1 if spec.mode[0] == "min" else -1

    completed = {each.number: each for each in trials if each.number >= first and has_completed(each)}
    last = math.inf
    ranks = {
        each: sign * completed[each].values[0] if each in completed else last
        for each in range(first, first + spec.population)
    }
    ranked = sorted(ranks, key=lambda each: (ranks[each], each))
    quarter = max(1, spec.population // 4)
    own = first + member
    if own in ranked[-quarter:] or own not in completed:
        best = [each for each in ranked[:quarter] if each in completed]
        return random.Random(f"{spec.seed} {number} parent").choice(best)
    return own


def lineage_of(folder: Path) -> list[int]:
    """The numbers of the trials that a trial descends from, the first generation's first, and its own."""
    parent = read_run_file(folder).get("parent")
    before = lineage_of(folder.parent / Path(str(parent["run"])).name) if isinstance(parent, dict) else []
    return [*before, int(folder.name)]


def values_of(spec: Spec, number: int, trials: Sequence[Any]) -> dict[str, Any]:
    """The settings of a trial: drawn, its own of the generation before, or another member's, perturbed."""
    draw, parent = random.Random(f"{spec.seed} {number}"), parent_of(spec, number, trials)
    space = {name: values for name, values in spec.space.items() if isinstance(values, Range)}
    if parent is None:
        return {name: _drawn(values, draw) for name, values in space.items()}
    before = next(trial for trial in trials if trial.number == parent).params
    if parent == number - spec.population:
        return dict(before)
    return {name: _perturbed(values, before[name], draw.choice(FACTORS)) for name, values in space.items()}


def _perturbed(values: Range, before: float, factor: float) -> float:
    """The value times the factor; at least a step away from it, if the range has steps and a value there."""
    value, step = before * factor, values.step or (1 if values.whole else 0)
    if abs(value - before) < step:  # it could be rounded to where it was
        value = before + math.copysign(step, (value - before) or (factor - 1))
    return _within(values, value)


def _drawn(values: Range, draw: random.Random) -> float:
    if values.log:
        return _within(values, math.exp(draw.uniform(math.log(values.low), math.log(values.high))))
    return _within(values, draw.uniform(values.low, values.high))


def _within(values: Range, value: float) -> float:
    value = min(max(value, values.low), values.high)
    if values.step is not None:
        most = math.floor((values.high - values.low) / values.step + 1e-9)  # steps of 0.1 from 0 to 0.3: 3
        steps = min(round((value - values.low) / values.step), most)
        value = min(values.low + steps * values.step, values.high)
    return round(value) if values.whole else value
