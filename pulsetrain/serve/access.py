"""Who may see the page: this machine alone, or who has the token."""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Access", "is_loopback"]

_HEADERS = {
    # styles: plotly writes them into its elements
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Access:
    """Lets requests through that only read, that name this server as their host, and that have the token.

    The host is compared because a page of another origin can make its own name point to this machine.

    Args:
        app: what answers.
        token: None where only this machine can connect.
        hosts: names of this server; None for any, where a token is needed.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: frozenset[str] | None) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _hardened(send))
            return
        await self._app(scope, receive, _hardened(send))

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads\n", 405)
        host, port = _host(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts and not is_loopback(host):
            return PlainTextResponse(f"{host!r} is not a name of this server\n", 421)
        if self._token is None:
            return None
        cookie = f"pulsetrain-token-{port}"  # browsers send cookies to all ports of a host
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if hmac.compare_digest(given.encode(), self._token.encode()):
            path = f"/{scope['path'].lstrip('/')}"  # a browser takes "//a" for the host a
            response = RedirectResponse(path, 303)  # the token leaves the address line
            # "strict" would leave it out after the redirect if a link on another page was followed
            response.set_cookie(cookie, self._token, httponly=True, samesite="lax", max_age=30 * 86400)
            return response
        kept = _cookie(headers.get("cookie", ""), cookie)
        if hmac.compare_digest(kept.encode(), self._token.encode()):
            return None
        return PlainTextResponse("needs the token: open the address that `pulsetrain serve` has printed\n", 401)


def _host(header: str) -> tuple[str, int]:
    """The name, and the port as the browser knows it, which differs from the server's in a tunnel."""
    try:
        found = urlsplit(f"//{header}")
        return found.hostname or "", found.port or 80
    except ValueError:  # such as a bracket that is not closed
        return "", 80


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _hardened(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending
