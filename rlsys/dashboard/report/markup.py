"""HTML built from parts, with all text escaped.

    h("p", "reward ", h("b", "<script>"), class_="muted")   # <p class="muted">reward <b>&lt;script&gt;</b></p>

All HTML of the pages is built with this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_VOID = ("meta", "br")
_LONG = 40
_HIDDEN = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    **{
        code: f"⟨U+{code:04X}⟩"
        for first, last in ((0x7F, 0x9F), (0x61C, 0x61C), (0x200B, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069))
        for code in range(first, last + 1)
    },
    0xFEFF: "⟨U+FEFF⟩",
}
"""Invisible or text-reversing characters, with their visible replacement."""


class Html(str):
    """Markup made by `h`. Any other string is text, and is escaped on insertion."""

    __slots__ = ()


def h(tag: str, *children: str | None, **attributes: str | float | None) -> Html:
    """Build one element. Attributes are written as `class_` and `aria_label`; a child or a value of None is omitted."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    shown = "".join(f' {name}="{_text(str(value))}"' for name, value in named.items())
    return Html(f"<{tag}{shown}>" if tag in _VOID else f"<{tag}{shown}>{join_html(*children)}</{tag}>")


def join_html(*children: str | None) -> Html:
    """Concatenate parts."""
    return Html("".join(child if isinstance(child, Html) else _text(child) for child in children if child is not None))


def _text(text: str) -> str:
    return escape(text.translate(_HIDDEN))


def cut(text: str, most: int, lines: int | None = None) -> str:
    """Cut the middle out of a text of more than `most` characters, as they are shown.

    With `lines`, it keeps at most these, and says how many characters it left out.
    """
    shown = text.translate(_HIDDEN)
    begin, end = shown[: most // 2], shown[-(most - most // 2) :]
    if lines is not None and shown.count("\n") >= lines:
        begin = "\n".join(begin.split("\n")[: lines // 2])
        end = "\n".join(end.split("\n")[-(lines - lines // 2) :])
    num = len(shown) - len(begin) - len(end)
    gap = "…" if lines is None else f" … {num:,} characters … "
    return f"{begin}{gap}{end}" if num > 0 else shown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Build a table that scrolls in a box if it is too wide; only long cells are wrapped."""
    header = h("tr", *(h("th", name, scope="col") for name in head))
    body = [h("tr", *(h("td", cell, class_="long" if len(cell) > _LONG else None) for cell in row)) for row in rows]
    inner = h("table", h("thead", header), h("tbody", *body))
    return h("div", inner, class_="scrolls", tabindex="0")
