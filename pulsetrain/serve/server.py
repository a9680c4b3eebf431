"""Runs the server: the address, the token, the files of the page."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import load_optional

__all__ = ["Address", "serve"]

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
        host = "localhost" if self.host in ("0.0.0.0", "::") else self.host  # only compared
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

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listening = _bound(host, port)
    address = Address(host, listening.getsockname()[1], token)
    app, close = app_of(root, token, None if token is not None else frozenset({host.strip("[]")}))
    server = Server(Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    try:
        on_start(address)
        asyncio.run(server.serve(sockets=[listening]))
    finally:
        close()
        listening.close()


def app_of(root: Path, token: str | None, hosts: frozenset[str] | None) -> tuple[Any, Callable[[], None]]:
    """The application, and what ends its threads."""
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
    return Access(app, token, hosts), store.close


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
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(128)
        made.set_inheritable(True)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        rule = f"cannot be used: {why}; choose another port, or port 0 for one that is free"
        raise ConfigurationError(rule, "serve", host=host, port=port) from error
    return made
