"""What the user's metrics still hold when a validation resets them: no checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from pulsetrain.state.fingerprint import Fingerprint
from pulsetrain.state.object_graph import is_users, package_of

__all__ = ["MetricsWatch"]


class MetricsWatch:
    """Compares what metrics hold after a reset with what they held after the first one of the run.

    Args:
        metrics: returns them by name; those of libraries are left out.
    """

    def __init__(self, metrics: Callable[[], Mapping[str, Any]]) -> None:
        self._metrics = metrics
        self._first: dict[str, Fingerprint | None] | None = None  # by name
        self.unseen: set[str] = set()
        """The metrics that cannot be compared."""

    def begin(self) -> None:
        """Metrics were reset: what they hold now is what a resumed run begins with."""
        if self._first is None:
            self._first = {name: self._reset(name, metric) for name, metric in self._own().items()}

    def changed(self) -> list[str]:
        """The attributes that another reset would not give the value that they had after the first one."""
        metrics, found = self._own(), list[str]()
        for name, first in (self._first or {}).items():
            now = self._reset(name, metrics[name])
            if first is not None and now is not None:
                found += now.changed_since(first)
        return found

    def _reset(self, name: str, metric: Any) -> Fingerprint | None:
        """What a copy of the metric holds after a reset: the metric itself keeps the values of the last validation."""
        found = Fingerprint()
        try:
            again = deepcopy(metric)
            again.reset()
        except Exception:  # it holds what cannot be copied
            self.unseen.add(f"metric {name}")
            return None
        found.add_attributes(f"metric {name}", again)
        return found

    def _own(self) -> dict[str, Any]:
        metrics = self._metrics().items()
        return {name: each for name, each in metrics if is_users(each) and package_of(each) != "torchmetrics"}
