"""Access control of the dashboard, and security headers of its answers.

On loopback the host name of a request must be one of loopback. This refuses a foreign page whose name resolves to
127.0.0.1 (DNS rebinding). A request that a page of another site makes is refused, too; a link there may open a page of
the dashboard, but no address of `/api`. On other addresses, and wherever a token is set, a request needs the token. The
token is given once, as `/?token=...`, and kept in a cookie that scripts cannot read; programs send `Authorization:
Bearer ...`. The connection is plain HTTP: on a shared network, use an SSH tunnel.
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
from rlsys.util.bearer_token import bearer_token

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
    """Access rules."""

    is_loopback: bool
    """True if only programs on this machine can connect. A request must then name loopback."""
    token: str | None
    """Required token; None: no token is required."""
    cookie: str = "rlsys"
    """Name of the cookie. Browsers share cookies between the ports of a machine, so each port has a different name."""

    @classmethod
    def of(cls, is_loopback: bool, port: int, environ: Mapping[str, str]) -> Access:
        """Take the token from the environment, or make one if other machines can connect.

        Raises `ConfigError` if the token in the environment is too short.
        """
        token = environ.get(TOKEN_VARIABLE)
        if token is not None and len(token) < _MIN_TOKEN:
            remedy = "make one with `openssl rand -hex 16`, or unset it to have one made"
            raise ConfigError(f"{TOKEN_VARIABLE} has {len(token)} characters, and needs {_MIN_TOKEN}; {remedy}")
        if token is None and not is_loopback:
            token = secrets.token_urlsafe()
        return cls(is_loopback, token, f"rlsys_{port}")

    def admits(self, *, token: str = "", cookie: str = "") -> bool:
        """True if the token or the cookie is right. Comparison takes constant time."""
        if self.token is None:
            return True
        is_token = hmac.compare_digest(token.encode(), self.token.encode())
        return hmac.compare_digest(cookie.encode(), self.cookie_value.encode()) or is_token

    @property
    def cookie_value(self) -> str:
        """Cookie value derived from the token, which may have any characters."""
        return sha256((self.token or "").encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """True if a name or an address always means this machine, such as `localhost`, `127.0.0.1` and `::1`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_response(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    """Response with an `ErrorAnswer`."""
    return Response(orjson.dumps(asdict(ErrorAnswer(error))), status, headers, media_type="application/json")


class Guard:
    """Middleware around the whole app: refuses requests without access, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
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
        """Answer in place of the app's; None if the request is allowed."""
        access = self._access
        if request.method not in ("GET", "HEAD"):
            return error_response(
                405, f"{request.method}: the dashboard only shows, ask with GET", {"Allow": "GET, HEAD"}
            )
        if access.is_loopback and not _names_loopback(request.headers.get("host", "")):
            return error_response(403, "the dashboard is for this machine: open it as localhost or 127.0.0.1")
        if _is_foreign(request):
            return error_response(403, "the dashboard answers its own pages: open its address yourself")
        given = request.query_params.get("token")
        if access.token is not None and given is not None and access.admits(token=given):
            return self._exchange()
        bearer = bearer_token(request.headers.getlist("authorization"))
        if not access.admits(token=bearer or "", cookie=request.cookies.get(access.cookie, "")):
            error = f"a token is needed: open the address that `rlsys dashboard` printed, or /?token=${TOKEN_VARIABLE}"
            return error_response(401, error, {"WWW-Authenticate": "Bearer"})
        return None

    def _exchange(self) -> Response:
        """Move the token from the URL, which browsers and logs record, to a cookie.

        The page reloads itself instead of redirecting. A redirect would belong to the click on a link elsewhere, such
        as in a chat, and browsers then send no strict cookie.
        """
        answer = Response(headers={"Refresh": "0; url=/"}, media_type="text/html")
        answer.set_cookie(self._access.cookie, self._access.cookie_value, httponly=True, samesite="strict")
        return answer


def _is_foreign(request: Request) -> bool:
    """True if a page of another site makes the request, by the headers that browsers add and scripts cannot set."""
    site, origin = request.headers.get("sec-fetch-site", "none"), request.headers.get("origin")
    is_link = request.headers.get("sec-fetch-mode") == "navigate" and not request.url.path.startswith("/api/")
    is_elsewhere = origin is not None and _address_of(origin) != request.headers.get("host", "")
    return is_elsewhere or (site not in ("none", "same-origin") and not is_link)


def _address_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _names_loopback(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
