"""Token of a request, from its header `Authorization`."""

from __future__ import annotations

from collections.abc import Sequence


def bearer_token(headers: Sequence[str]) -> str | None:
    """Return the token of the only `Authorization` header of a request; None if it has none, several, or another form.

    >>> bearer_token(["Bearer abc"]), bearer_token(["abc"]), bearer_token([])
    ('abc', None, None)
    """
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    return token if scheme.lower() == "bearer" and token else None
