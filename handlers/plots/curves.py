"""The data of a run's figures: values over its iterations, thinned to what a figure can show, and matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from pulsetrain.handlers.plots import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MAX_POINTS", "Curve", "Point", "RunCurves", "thinned"]

MAX_POINTS = 2048  # of one curve: more would not be visible, and memory stays bounded
MAX_PANELS = 24  # of metrics
MAX_LAYERS = 6  # in addition to the total gradient norm
_RATES = {"samples_per_second": "samples per second", "tokens_per_second": "tokens per second"}  # measured with a clock
_BUCKET = 4  # points


class Point(NamedTuple):
    """One value."""

    iteration: int
    value: float


class Curve:
    """One metric's values, in the order of their iterations.

    >>> curve = Curve()
    >>> for iteration, value in ((1, 0.9), (2, 0.8), (2, 0.7)):
    ...     curve.add(iteration, value)
    >>> curve.points
    [Point(iteration=1, value=0.9), Point(iteration=2, value=0.7)]
    """

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, iteration: int, value: float) -> None:
        """Add a value; it replaces those of this iteration and later ones, which a resumed run adds again."""
        while self.points and self.points[-1].iteration >= iteration:
            self.points.pop()
        self.points.append(Point(iteration, value))
        if len(self.points) > MAX_POINTS:
            self.points = thinned(self.points)

    def largest(self) -> float:
        """The largest finite value."""
        return max((each.value for each in self.points if math.isfinite(each.value)), default=-math.inf)

    def state_dict(self) -> dict[str, Sequence[float]]:
        return {"iterations": [each.iteration for each in self.points], "values": [each.value for each in self.points]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        pairs = zip(state["iterations"], state["values"], strict=True)
        self.points = [Point(int(iteration), float(value)) for iteration, value in pairs]


def thinned(points: list[Point]) -> list[Point]:
    """About half of the points, with every spike: of each four the smallest, the largest and a non-finite one.

    The first and the last are kept too.
    """
    if len(points) <= 2:
        return list(points)
    kept = [points[0]]
    for start in range(1, len(points) - 1, _BUCKET):
        bucket = points[start : min(start + _BUCKET, len(points) - 1)]
        finite = [each for each in bucket if math.isfinite(each.value)]
        others = [each for each in bucket if not math.isfinite(each.value)][:1]
        ends = {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))} if finite else set()
        kept += sorted([*ends, *others])
    return [*kept, points[-1]]


class RunCurves:
    """The data of one engine's figures."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.matrices: dict[str, tuple[int, list[list[float]]]] = {}  # name -> (iteration, counts)
        self.validated: set[str] = set()  # curves of validations or rollouts
        self.changed: set[str] = set()  # figures to draw

    def add(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add values of a training step; those that no figure shows are ignored."""
        for name, value in metrics.items():
            if name.startswith("train/") or _figure_of(name) not in ("loss", "metrics"):
                self.curves.setdefault(name, Curve()).add(iteration, float(value))
                self.changed.add(_figure_of(name))

    def add_round(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add all values of a validation or a rollout."""
        for name, value in metrics.items():
            self.curves.setdefault(name, Curve()).add(iteration, float(value))
            self.changed.add(_figure_of(name))
        self.validated.update(metrics)

    def put(self, name: str, iteration: int, matrix: list[list[float]]) -> None:
        """Set the latest matrix of that name."""
        self.matrices[name] = iteration, matrix
        self.changed.add(name)

    def state_dict(self) -> dict[str, Any]:
        return {
            "curves": {name: curve.state_dict() for name, curve in self.curves.items() if name not in _RATES},
            "matrices": {name: [iteration, matrix] for name, (iteration, matrix) in self.matrices.items()},
            "validated": sorted(self.validated),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curves = {name: curve for name, curve in self.curves.items() if name in _RATES}  # measured in this process
        for name, saved in state["curves"].items():
            self.curves[name] = Curve()
            self.curves[name].load_state_dict(saved)
        self.matrices = {name: (int(iteration), matrix) for name, (iteration, matrix) in state["matrices"].items()}
        self.validated = set(state["validated"])
        self.changed = {_figure_of(name) for name in self.curves} | set(self.matrices)

    def snapshot(self, names: Collection[str]) -> dict[str, Any]:
        """The data of the figures with these names, for `load_state_dict` of another object; it does not change."""
        return {
            "curves": {name: curve.state_dict() for name, curve in self.curves.items() if _figure_of(name) in names},
            "matrices": {name: self.matrices[name] for name in names if name in self.matrices},
            "validated": sorted(self.validated),
        }

    def figure(self, name: str) -> Figure | None:
        """The figure of that name; None if it would be empty."""
        if name in self.matrices:
            iteration, matrix = self.matrices[name]
            return figures.confusion_matrix(matrix, f"{name}, iteration {iteration:,}")
        found = sorted(each for each in self.curves if _figure_of(each) == name)
        panels_of: Callable[[list[str]], list[figures.Panel]] = getattr(self, name)  # the methods below
        panels = panels_of(sorted(found, key=lambda each: not each.startswith("train/")))
        return figures.curves(panels) if panels else None

    def panel(self, title: str, unit: str, labels: Mapping[str, str]) -> figures.Panel:
        """A panel of the curves with these names, which get these labels."""
        curves = {label: self.curves[name].points for name, label in labels.items()}
        marked = frozenset(label for name, label in labels.items() if name in self.validated)
        return figures.Panel(title, unit, curves, marked)

    def loss(self, names: list[str]) -> list[figures.Panel]:
        return [self.panel("loss", "loss", {name: name for name in names})]

    def metrics(self, names: list[str]) -> list[figures.Panel]:
        # without validation, all of them
        wanted = {_metric(name) for name in names if name in self.validated} or set(map(_metric, names))
        panels = []
        for metric in sorted(wanted)[:MAX_PANELS]:
            labels = {name: name.rpartition("/")[0] or name for name in names if _metric(name) == metric}
            panels.append(self.panel(metric, metric, labels))
        return panels

    def learning_rate(self, names: list[str]) -> list[figures.Panel]:
        groups = [name for name in names if "/" in name]
        named = [name for name in groups if not name.rpartition("/")[2].isdigit()]  # named by LRMonitor
        labels = {name: name.partition("/")[2] for name in named or groups}
        if not named:
            labels = {name: f"group {label}" for name, label in labels.items()}
        return [self.panel("learning rate", "learning rate", labels or {name: name for name in names})]

    def grad_norm(self, names: list[str]) -> list[figures.Panel]:
        layers = [name for name in names if "/" in name]
        shown = sorted(sorted(layers, key=lambda name: -self.curves[name].largest())[:MAX_LAYERS])
        title = "gradient norm before clipping"
        if len(shown) < len(layers):
            title += f" (the largest {len(shown)} of {len(layers)})"
        labels = {name: "total" for name in names if "/" not in name} | {name: name.partition("/")[2] for name in shown}
        return [self.panel(title, "L2 norm", labels)]

    def throughput(self, names: list[str]) -> list[figures.Panel]:
        return [self.panel(_RATES[name], _RATES[name], {name: _RATES[name]}) for name in names]


def _figure_of(name: str) -> str:
    """The figure that a metric belongs to."""
    if name.partition("/")[0] in ("learning_rate", "grad_norm"):
        return name.partition("/")[0]
    if name in _RATES:
        return "throughput"
    return "loss" if name.endswith("loss") else "metrics"


def _metric(name: str) -> str:
    return name.rpartition("/")[2]
