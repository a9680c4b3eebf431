"""Computes answers in threads that do not hold up the end of the server, as those of asyncio's pool would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

_AT_ONCE = threading.BoundedSemaphore(8)  # the page asks for all charts together

T = TypeVar("T")
A = TypeVar("A")


async def in_thread(action: Callable[[A], T], argument: A) -> T:
    """The result of an action that takes its time.

    >>> asyncio.run(in_thread(len, "abc"))
    3
    """
    future: Future[T] = Future()

    def work() -> None:
        with _AT_ONCE:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action(argument))
            except BaseException as error:  # raised where it is awaited
                future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)
