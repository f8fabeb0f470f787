"""Who may ask the dashboard, and what a browser may do with its answers.

On loopback the name in the request must be one of loopback: a page from elsewhere that had its own name point to
127.0.0.1 (DNS rebinding) is refused. Anywhere else, and wherever a token is set, the token must be shown. It is given
once, as `/?token=...`, and kept by the browser in a cookie that no script can read; programs send
`Authorization: Bearer ...`. The connection is plain HTTP: over a network that others share, use an SSH tunnel.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlsys.dashboard.responses import ErrorAnswer
from rlsys.errors import ConfigError

TOKEN_VARIABLE = "RLSYS_DASHBOARD_TOKEN"

_MIN_TOKEN = 16

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    is_loopback: bool
    """Can only programs on this machine reach it? Then the request must name loopback."""
    token: str | None
    """What must be shown; None: nothing."""
    cookie: str = "rlsys"
    """Name of the cookie that stands for it. Browsers share cookies between the ports of a machine: one for each."""

    @classmethod
    def of(cls, is_loopback: bool, port: int, environ: Mapping[str, str]) -> Access:
        """The token is that of the environment; there, or a new one, if others than this machine can ask.

        Raises `ConfigError` if the one in the environment is too short.
        """
        token = environ.get(TOKEN_VARIABLE)
        if token is not None and len(token) < _MIN_TOKEN:
            remedy = "make one with `openssl rand -hex 16`, or unset it to have one made"
            raise ConfigError(f"{TOKEN_VARIABLE} has {len(token)} characters, and needs {_MIN_TOKEN}; {remedy}")
        if token is None and not is_loopback:
            token = secrets.token_urlsafe()
        return cls(is_loopback, token, f"rlsys_{port}")

    def admits(self, *, token: str = "", cookie: str = "") -> bool:
        """Is one of them right? It takes as long for a wrong one as for the right one."""
        if self.token is None:
            return True
        is_token = hmac.compare_digest(token.encode(), self.token.encode())
        return hmac.compare_digest(cookie.encode(), self.cookie_value.encode()) or is_token

    @property
    def cookie_value(self) -> str:
        """It follows from the token, whatever characters that has."""
        return sha256((self.token or "").encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Does a name or an address always mean this machine, as `localhost`, `127.0.0.1` and `::1` do?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refused(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    """An `ErrorAnswer`."""
    return Response(orjson.dumps(asdict(ErrorAnswer(error))), status, headers, media_type="application/json")


class Guard:
    """Around all of the app: refuses what may not be asked, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        cache = "no-store" if scope["path"].startswith("/api/") else "no-cache"  # pages change with the version

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers["Cache-Control"] = cache
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        return await answer(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        """What is to be said instead of what was asked for, if anything."""
        access = self._access
        if request.method not in ("GET", "HEAD"):
            return refused(405, f"{request.method}: the dashboard only shows, ask with GET", {"Allow": "GET, HEAD"})
        if access.is_loopback and not _names_loopback(request.headers.get("host", "")):
            return refused(403, "the dashboard is for this machine: open it as localhost or 127.0.0.1")
        given = request.query_params.get("token")
        if access.token is not None and given is not None and access.admits(token=given):
            return self._exchange()
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not access.admits(token=bearer, cookie=request.cookies.get(access.cookie, "")):
            error = f"a token is needed: open the address that `rlsys dashboard` printed, or /?token=${TOKEN_VARIABLE}"
            return refused(401, error, {"WWW-Authenticate": "Bearer"})
        return None

    def _exchange(self) -> Response:
        """From the address, which histories and logs keep, the token goes to a cookie.

        The page goes on by itself: a redirect would be part of a click on a link elsewhere, in a chat or a terminal of
        the browser, and browsers send no strict cookie with that.
        """
        answer = Response(headers={"Refresh": "0; url=/"}, media_type="text/html")
        answer.set_cookie(self._access.cookie, self._access.cookie_value, httponly=True, samesite="strict")
        return answer


def _names_loopback(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
