"""Credentials in URLs, which records of a run must not have."""

from __future__ import annotations

import re
from urllib.parse import unquote

_SCHEME = r"\b[a-z][a-z0-9+.-]{0,20}://"
_PORT = r"(?:80|443|\d{4,5})/"
_USER = re.compile(
    rf"(?i){_SCHEME}[^/?#\s@]{{1,200}}@"  # of any scheme, before the path
    rf"|{_SCHEME}[^/?#\s@]{{0,200}}:(?!{_PORT})[^\s@\"'<>]{{0,200}}@"  # a password with a raw / ? or #
)
_USER_IN_URL = re.compile(rf"(?i)\A(?:\w+:)?{_SCHEME}[^/?#@]*:(?!{_PORT})[^@]*@")
"""In a text that is a URL, in which a password may have raw spaces."""
_URL = re.compile(rf"(?i){_SCHEME}[^\s\"'<>]*")
_SEPARATORS = re.compile("[?&;#]")
_PARAMETER = re.compile(
    r"(?i)(?!(?:max|min|page|next|start|eos|bos|pad|stop)[-_.]?token=)"
    r"((?:[\w.-]*[-_.])?"
    r"(?:token|auth|authorization|secret|password|passwd|pwd|passphrase|credentials?|sig|signature|bearer|jwt)"
    r"|(?:[\w.-]*[-_.])?(?:api|access|secret|private|subscription|account|shared|license|auth)[-_.]?key(?:[-_.]?id)?"
    r"|[\w.-]*(?:apikey|accesstoken|authtoken|accesskeyid|clientsecret)"
    r"|key|pass)=[^\s&;#]"
)
_SHOWN_USER = re.compile(rf"(?i)({_SCHEME})(?:[^/?#\s@]+@|[^/?#\n@]*:(?=[^\n]*@))(?:[^\n]*@)?")
"""In a message, where quotes and spaces may be those of a password: up to the last @ of the line."""


def credential_in(text: str) -> str | None:
    """Return the kind of the first credential in a URL of a text; None if there is none.

    >>> credential_in("https://me:a/b@host/v1"), credential_in("https://host/v1?api_key=x"), credential_in("hf://a/b@c")
    ('a user name or password', 'a credential (`api_key=`)', None)
    """
    if "@" in text and (_USER.search(text) or _USER_IN_URL.match(text)):
        return "a user name or password"
    parameter = _parameter_in(text) or _parameter_in(unquote(text))
    return parameter and f"a credential (`{parameter}=`)"


def without_credentials(text: str) -> str:
    """Replace credentials in the URLs of a text by `***`."""
    if "@" in text:
        text = _SHOWN_USER.sub(r"\1***@", text)
    return _URL.sub(lambda found: _without_parameters(found[0]), text)


def _parameter_in(text: str) -> str | None:
    """Name of the first parameter of a URL that is a credential."""
    parts = (part for url in _URL.findall(text) for part in _SEPARATORS.split(url)[1:])
    return next((found[1] for part in parts if (found := _PARAMETER.match(part))), None)


def _without_parameters(url: str) -> str:
    has_credential = _parameter_in(url) or _parameter_in(unquote(url))
    return _SEPARATORS.split(url, maxsplit=1)[0] + "?***" if has_credential else url
