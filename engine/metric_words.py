"""What a run, and the name of a metric, say about which of its values are better."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Literal

__all__ = ["KNOWN_WORDS", "Mode", "mode_of", "mode_of_words"]

Mode = Literal["min", "max"]

_LOWER = ("loss", "perplexity", "kl", "error", "mae", "mse", "rmse", "bits_per_byte")
_HIGHER = ("accuracy", "acc", "f1", "precision", "recall", "auc", "iou", "bleu", "return", "reward")
# next to a known word they turn its direction, or make another quantity of it
_CHANGING = (
    "neg", "negative", "negated", "minus", "inv", "inverse", "inverted", "non", "not", "false", "drop", "gap", "delta",
    "diff", "difference", "change", "scale", "weight", "ratio", "coef", "coefficient", "std", "variance", "target",
    "missed", "complement", "opposite", "violation", "violations", "time", "correction", "rejected",
    "reduction", "improvement", "increase", "decrease", "degradation", "regret", "penalty", "free", "no", "explained",
)  # fmt: skip

KNOWN_WORDS: Final = (*_LOWER, *_HIGHER)
"""Words that say which values are better."""


@lru_cache(maxsize=1024)  # of many runs, the same names are asked for
def mode_of_words(name: str) -> Mode | None:
    """Whether smaller ("min") or larger ("max") values are better, by the words after the last "/"; None if unknown.

    >>> mode_of_words("val/loss"), mode_of_words("val/acc"), mode_of_words("accuracy_loss")
    ('min', 'max', None)
    """
    words = f"_{name.lower().rpartition('/')[2]}_"
    lower, higher, changed = (any(f"_{word}_" in words for word in listed) for listed in (_LOWER, _HIGHER, _CHANGING))
    if lower == higher or changed:
        return None
    return "min" if lower else "max"


def mode_of(name: str, modes: Mapping[str, Mode]) -> Mode | None:
    """Which values of a metric are better: as the run has decided, else by the words of its name; None if unknown.

    >>> mode_of("val/top5", {"val_top5": "max"}), mode_of("val/loss", {}), mode_of("val/top5", {})
    ('max', 'min', None)

    Args:
        name: of the metric, or of one value of a metric that is a mapping.
        modes: of metrics, by their names, also with "_" in place of "/": see `modes_of` of a run's description.
    """
    names = (name, name.replace("/", "_"), name.rpartition("/")[0])
    return next(filter(None, map(modes.get, names)), None) or mode_of_words(name)
