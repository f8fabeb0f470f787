"""Foreign text in a terminal: text of data, models, tools and files, and errors that quote it."""

from __future__ import annotations

from unicodedata import category


def printable(text: str) -> str:
    """Replace each character that a terminal would obey or hide by `\N{REPLACEMENT CHARACTER}`.

    Everything that rlsys prints passes through here, except JSON, which escapes such characters.
    """
    return "".join(c if _is_shown(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_shown(c: str) -> bool:
    return c.isprintable() or c in "\n\t" or category(c) == "Zs"
