"""Notifies the pages that are open of the runs that have changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

__all__ = ["Changes"]

_PAUSE = 0.2  # seconds between two messages: many changes go in one
_SILENCE = 15.0  # seconds, after which an empty message keeps the connection


class Changes:
    """Names of runs that have changed, for everyone who listens."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: set[_Listener] = set()
        self._is_closed = False

    def close(self) -> None:
        """End all listening; from any thread."""
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for each in self._listeners:
            each.event.set()

    def add(self, name: str) -> None:
        """Note a change; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, name)

    def _tell(self, name: str) -> None:
        for each in self._listeners:
            each.names.add(name)
            each.event.set()

    async def listen(self) -> AsyncIterator[set[str]]:
        """The names that have changed since the last time, until `close`; none at first, and after a silence."""
        self._loop = asyncio.get_running_loop()
        listener = _Listener()
        self._listeners.add(listener)
        try:
            yield set()
            while not self._is_closed:
                try:
                    await asyncio.wait_for(listener.event.wait(), _SILENCE)
                except TimeoutError:
                    yield set()
                    continue
                if self._is_closed:
                    return
                await asyncio.sleep(_PAUSE)
                listener.event.clear()
                names, listener.names = listener.names, set()
                yield names
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.event = asyncio.Event()
