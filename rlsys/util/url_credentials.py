"""Credentials in URLs, which records of a run must not have."""

from __future__ import annotations

import re
from urllib.parse import unquote

_SCHEME = r"\b[a-z][a-z0-9+.-]*://"
_USER = re.compile(
    rf"(?i){_SCHEME}[^/?#\s@]+@"  # of any scheme, before the path
    rf"|{_SCHEME}[^/?#\s@]*:[^\s@\"'<>]*@"  # a password with a raw / ? or #, which may look like a port at first
)
_USER_IN_URL = re.compile(rf"(?i)\A(?:\w+:)?{_SCHEME}[^/?#@]*:[^@]*@")
"""In a text that is a URL, in which a password may have raw spaces."""
_PARAMETER = re.compile(
    rf"(?i){_SCHEME}[^\s\"'<>]*?[?&;#]"
    r"((?:[\w.-]*[-_.])?"
    r"(?:token|auth|authorization|secret|password|passwd|pwd|passphrase|credentials?|sig|signature|bearer|jwt)"
    r"|(?:[\w.-]*[-_.])?(?:api|access|secret|private|subscription|account|shared|license|auth)[-_.]?key(?:[-_.]?id)?"
    r"|[\w.-]*(?:apikey|accesstoken|authtoken|accesskeyid|clientsecret)"
    r"|key|pass)=[^\s&;#]"
)
_URL = re.compile(rf"(?i){_SCHEME}\S*")
_SHOWN_USER = re.compile(rf"(?i)({_SCHEME})(?:[^/?#\s@]+@|[^/?#\n@]*:(?=[^\n]*@))(?:[^\n]*@)?")
"""In a message, where quotes and spaces may be those of a password: up to the last @ of the line."""


def credential_in(text: str) -> str | None:
    """Return the kind of the first credential in a URL of a text; None if there is none.

    >>> credential_in("https://me:a/b@host/v1"), credential_in("https://host/v1?api_key=x"), credential_in("hf://a/b@c")
    ('a user name or password', 'a credential (`api_key=`)', None)
    """
    if _USER.search(text) or _USER_IN_URL.match(text):
        return "a user name or password"
    if found := _PARAMETER.search(unquote(text)):
        return f"a credential (`{found[1]}=`)"
    return None


def without_credentials(text: str) -> str:
    """Replace credentials in the URLs of a text by `***`."""
    text = _SHOWN_USER.sub(r"\1***@", text)
    return _URL.sub(lambda found: _without_parameters(found[0]), text)


def _without_parameters(url: str) -> str:
    return re.split(r"[?&;#]", url, maxsplit=1)[0] + "?***" if _PARAMETER.search(unquote(url)) else url
