"""Values by the names of metrics, as mappings that answer an unknown name with those that exist."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeVar

from pulsetrain.engine.errors import MetricNotFoundError, did_you_mean

__all__ = ["NamedValues", "UnknownMetricError"]

V = TypeVar("V")


class UnknownMetricError(MetricNotFoundError, KeyError):
    """A name that no metric has; also a KeyError, as for any mapping.

    >>> print(UnknownMetricError.among(["train/loss", "val/loss"], "val/los"))
    metric='val/los': this metric does not exist; there are: train/loss, val/loss; did you mean 'val/loss'?
    """

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's puts quotes around the message

    @classmethod
    def among(
        cls, known: Iterable[object], name: object, place: str = "", several: Sequence[str] = ()
    ) -> UnknownMetricError:
        """The error for a name that is not among the known ones, or may mean several of them."""
        names = sorted(map(str, known))
        exist = ", ".join(names) or "none at all"
        problem = f"may be {' or '.join(several)}" if several else "does not exist"
        return cls(f"this metric {problem}; there are: {exist}{did_you_mean(name, names)}", place, metric=name)


class NamedValues(dict[str, V]):
    """A dict whose error for an unknown name lists the names that there are.

    Pickled, copied or in a checkpoint it is a plain mapping, which is read without this package.

    >>> values = NamedValues({"val/accuracy": 0.5})
    >>> values.get("val/acc"), "val/acc" in values
    (None, False)
    >>> values["val/acc"]
    Traceback (most recent call last):
    pulsetrain.engine.named_values.UnknownMetricError: metric='val/acc': this metric does not exist; there are: \
val/accuracy; did you mean 'val/accuracy'?
    """

    def __missing__(self, name: object) -> NoReturn:
        raise UnknownMetricError.among(self, name)

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load reads with weights_only=True
