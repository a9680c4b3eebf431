"""The shipped handlers by the names that a configuration may use; a handler is imported when it is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pulsetrain.handlers as shipped
from pulsetrain.configuration.class_paths import Factory

__all__ = ["HANDLERS", "ShippedHandlers"]


class ShippedHandlers(Mapping[str, Factory]):
    """Handlers by name.

    Args:
        names: the name of each handler's class, by the name to look it up.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def __getitem__(self, name: str) -> Factory:
        found: Factory = getattr(shipped, self._names[name])
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without an import

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


HANDLERS = ShippedHandlers({name: name for name in vars(shipped)["__all__"] if not name.startswith("Callback")})
