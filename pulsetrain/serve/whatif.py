"""What a handler would have done in recorded runs, from their curves: the same as `pulsetrain replay` says."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metric_words import Mode, mode_of_words
from pulsetrain.handlers import EarlyStopping, LossSpikeGuard
from pulsetrain.report.run_curves import EACH_ITERATION
from pulsetrain.serve.store import Series

__all__ = ["early_stopping", "loss_spikes"]


def early_stopping(series: Series, metric: str, patience: int, min_delta: float, mode: str | None) -> dict[str, Any]:
    """Where early stopping would have ended a run.

    Args:
        series: the run's curves.
        metric: a value of its validations or rollouts.
        patience: validations without an improvement.
        min_delta: an improvement is larger.
        mode: "min" or "max", as the run has decided; None to decide by the metric's name.

    Returns:
        `stops_at`, the iteration, or None; `best` and `best_at`; `saved`, in iterations; `last`.
    """
    chosen = mode_of_words(metric) if mode is None else mode
    if chosen not in ("min", "max"):
        raise ConfigurationError(
            f"mode={mode!r}: whether {metric!r} should fall or rise is not known; choose min or max"
        )
    handler = EarlyStopping(metric, patience=patience, min_delta=min_delta, mode=cast(Mode, chosen))
    about = series.about
    found = series.points(metric) if metric in (*about.validated, *about.rolled_out) else None
    at, values = (found[0], found[2]) if found is not None else (np.empty(0), np.empty(0))
    best_at = stops_at = None
    for iteration, value in zip(at.astype(int).tolist(), values.tolist(), strict=True):
        stop = handler.step(value)
        best_at = iteration if handler.is_best else best_at
        if stop:
            stops_at = iteration
            break
    saved = about.last - stops_at if stops_at is not None else 0
    return {
        "stops_at": stops_at, "best": handler.best_value, "best_at": best_at, "saved": saved, "last": about.last,
        "values": len(at),
    }  # fmt: skip


def loss_spikes(series: Series, metric: str, threshold: float, window: int, patience: int) -> dict[str, Any]:
    """Which losses the spike guard would have reported, with policy "warn".

    Args:
        series: the run's curves.
        metric: a value of each iteration's output, such as "loss".
        threshold: spreads above the median.
        window: losses.
        patience: spikes in a row that are a new level.

    Returns:
        `spikes`, their number; `first`, the iteration; `rows`, the iterations of the first in each row, at most 50.
    """
    guard = LossSpikeGuard(threshold, window, patience=patience)
    found = series.points(f"{metric}, {EACH_ITERATION}")
    at, values = (found[0], found[2]) if found is not None else (np.empty(0), np.empty(0))
    spiked = guard.steps(np.asarray(values, dtype=np.float64))
    begins = spiked & ~np.concatenate([[False], spiked[:-1]])
    rows = at[begins][:50].astype(int).tolist()
    first = rows[0] if rows else None
    return {"spikes": int(spiked.sum()), "first": first, "rows": rows, "last": series.about.last, "values": len(at)}
