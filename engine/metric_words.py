"""What the name of a metric says about which of its values are better."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["KNOWN_WORDS", "Mode", "mode_of_words"]

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
