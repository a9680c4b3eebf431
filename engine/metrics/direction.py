"""Whether smaller or larger values of a metric are better, for everything that ranks values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import nn

from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError, did_you_mean
from pulsetrain.engine.metric_words import KNOWN_WORDS, Mode, mode_of_words
from pulsetrain.engine.metrics.reading import canonical

__all__ = ["Mode", "infer_mode", "names_of", "required_mode"]


def infer_mode(name: str, metrics: Mapping[str, object] | None = None) -> Mode | None:
    """Whether smaller ("min") or larger ("max") values of a metric are better; None if that is not known.

    The metric object decides by its `higher_is_better`, as torchmetrics' have it; else the words of the name after its
    last "/", in upper or lower case, which must not contradict each other, or be changed by a word such as "negative"
    or "gap". Of a torchmetrics MetricCollection, each metric decides for itself.

    >>> infer_mode("val/loss"), infer_mode("val/token_accuracy"), infer_mode("val/top5"), infer_mode("accuracy_loss")
    ('min', 'max', None, None)

    Args:
        name: the metric's full name, or its underscore form.
        metrics: full name -> metric object; one that computes a mapping decides for all its values.
    """
    metrics = metrics or {}
    with suppress(MetricNotFoundError):
        name = canonical(name, dict.fromkeys([*metrics, *names_of(metrics)]))
    owner, _, last = name.rpartition("/")
    for metric in (metrics.get(name), _members(metrics.get(owner)).get(last), metrics.get(owner)):
        higher = getattr(metric, "higher_is_better", None)
        if isinstance(higher, bool):  # ignite's metrics answer to any name
            return "max" if higher else "min"
    return mode_of_words(name)


def names_of(metrics: Mapping[str, object]) -> list[str]:
    """The full names of the metrics' values, with those of the members of a torchmetrics.MetricCollection."""
    names = ((name, [f"{name}/{member}" for member in _members(metric)]) for name, metric in metrics.items())
    return [each for name, members in names for each in members or [name]]


def required_mode(place: str, name: str, metrics: Mapping[str, object] | None = None) -> Mode:
    """As `infer_mode`, for a caller who has to know.

    Raises:
        ConfigurationError: it is not known; the message asks for it.

    >>> required_mode("EarlyStopping", "val/top5")
    Traceback (most recent call last):
    pulsetrain.engine.errors.ConfigurationError: EarlyStopping(mode=None): whether smaller or larger values of \
metric='val/top5' are better does not follow from its name; pass mode='min' or mode='max'
    """
    mode = infer_mode(name, metrics)
    if mode is None:
        prefix, last = name[: name.rfind("/") + 1], name[name.rfind("/") + 1 :]
        near = [word for word in (*names_of(metrics or {}), *KNOWN_WORDS) if did_you_mean(last, [word])]
        names = [f"{prefix}{word}" for word in near]
        rule = (
            "whether smaller or larger values of {metric} are better does not follow from its name; pass mode='min' or "
            f"mode='max'{did_you_mean(name, names)}"
        )
        raise ConfigurationError(rule, place, mode=None, metric=name)
    return mode


def _members(metric: object) -> Mapping[str, object]:
    """The metrics of a torchmetrics.MetricCollection, by the names of their values."""
    return dict(metric.items()) if isinstance(metric, nn.ModuleDict) else {}
