"""Runs the server: the address, the token, the files of the page."""

from __future__ import annotations

import asyncio
import errno
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional

__all__ = ["Address", "serve"]

_TOKEN = re.compile(r"[\w.~-]{8,}", re.ASCII)
_LONGEST_REQUEST = 1 << 20  # bytes
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Address:
    """Where the page is."""

    host: str
    port: int
    token: str | None = None

    @property
    def url(self) -> str:
        """What is opened in a browser."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # only compared
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/{f'?token={self.token}' if self.token else ''}"


def serve(
    root: Path, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None,
    on_start: Callable[[Address], object] = lambda address: None,
) -> None:  # fmt: skip
    """Show the runs below a folder as a page, until the process is stopped.

    Args:
        root: a folder with runs.
        host: an address of this machine. For one that others can reach, a token is needed; one is made.
        port: 0 for any that is free.
        token: what a browser has to know; by default one is made where it is needed.
        on_start: called when the page can be opened.

    Raises:
        ConfigurationError: the packages of the extra are not installed, or the address cannot be used.
        RunFolderError: the folder does not exist.
    """
    for package in ("starlette", "uvicorn", "plotly"):
        load_optional("serve", package, "serve")
    from uvicorn import Config, Server

    from pulsetrain.serve.access import is_loopback

    if token is not None and _TOKEN.fullmatch(token) is None:
        rule = "needs at least 8 letters, digits or characters of _ . ~ -; leave it out, and one is made"
        raise ConfigurationError(rule, "serve", token=token)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listening = _bound(host, port)
    address = Address(host, listening.getsockname()[1], token)
    try:
        app, end_streams, close = app_of(root, token, None if token is not None else frozenset({host.strip("[]")}))
    except BaseException:
        listening.close()
        raise

    class Ending(Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            end_streams()
            super().handle_exit(sig, frame)

    # h11, as only its limit can be raised: a request names each run, and 500 long names take more than 64 kB
    protocol: dict[str, Any] = {"http": "h11", "h11_max_incomplete_event_size": _LONGEST_REQUEST}
    server = Ending(Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, **protocol))
    try:
        on_start(address)
        with _terminated():
            asyncio.run(server.serve(sockets=[listening]))
    finally:
        close()
        listening.close()


@contextmanager
def _terminated() -> Iterator[None]:
    """Leave by SystemExit on SIGTERM, so that what is open is closed."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def leave(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def app_of(
    root: Path, token: str | None, hosts: frozenset[str] | None
) -> tuple[Any, Callable[[], None], Callable[[], None]]:
    """The application, what ends its streams, and what ends its threads and processes."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from pulsetrain.serve.access import Access
    from pulsetrain.serve.api import routes_of
    from pulsetrain.serve.changes import Changes
    from pulsetrain.serve.store import Store

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        content = _file(name)
        if content is None:
            return Response(f"there is no {name} here\n", 404, media_type="text/plain")
        form = _TYPES[Path(name).suffix]
        kept = {"Cache-Control": "max-age=86400"} if name == "plotly.js" else {}
        return Response(content, media_type=f"{form}; charset=utf-8", headers=kept)

    changes = Changes()
    store = Store(root, changes.add)
    store.start()
    app = Starlette(routes=[Route("/", page), *routes_of(store, changes), Route("/{name}", page)])
    return Access(app, token, hosts), changes.close, store.close


@cache
def _file(name: str) -> bytes | None:
    if name == "plotly.js":
        return str(load_optional("serve", "plotly.offline", "serve").get_plotlyjs()).encode()
    found = {each.name: each for each in files("pulsetrain.serve").joinpath("static").iterdir()}
    return found[name].read_bytes() if name in found and Path(name).suffix in _TYPES else None


def _bound(host: str, port: int) -> socket.socket:
    check_whole_number("serve", "port", port, 0, 65536)  # the system would take the last 16 bits of a larger one
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(where)
            made.listen(128)
            made.set_inheritable(True)
        except BaseException:
            made.close()
            raise
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another port, or port 0 for one that is free" if is_port else "an address of this machine"
        rule = f"cannot be used: {why}; choose {remedy}"
        raise ConfigurationError(rule, "serve", host=host, port=port) from error
    return made
