"""Bounds of YAML that someone else may have written: its parser is slow, and aliases of aliases grow exponentially."""

from __future__ import annotations

import re

from ruamel.yaml import MappingNode, Node, SequenceNode

MOST_LETTERS = 2**17
"""Most letters of a configuration. The parser takes two seconds for so many."""
MOST_MARKS = 20_000
"""Most marks of `_MARKS` in a configuration. It has at most one value more than marks."""
_MARKS = ",:-?[{\n"
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_MOST_GROWN = 2**20
"""Most letters of a configuration with every alias written out, and every key with those above it."""
_OF_VALUE = 10
"""Letters that a value counts beside its own."""


def excess_of(text: str) -> str | None:
    """Return what a configuration has too much of, in words; None if it may be parsed."""
    if len(text) > MOST_LETTERS:
        return f"it has more than {MOST_LETTERS} letters"
    content = _COMMENT.sub("", text)
    if sum(map(content.count, _MARKS)) > MOST_MARKS:
        return f"it has more than {MOST_MARKS} of the letters {_MARKS.strip()}, and lines"
    return None


def grows_without_bound(node: Node | None) -> bool:
    """Return True if a parsed configuration is far larger with its aliases written out, or contains itself."""
    grown, waiting = 0, [(node, 0)] if node is not None else []
    while waiting and grown <= _MOST_GROWN:
        found, above = waiting.pop()
        grown += _OF_VALUE + above
        if isinstance(found, MappingNode):
            for key, value in found.value:
                named = len(key.value) if isinstance(key.value, str) else 0
                waiting += [(key, 0), (value, above + named)]
        elif isinstance(found, SequenceNode):
            waiting += [(each, 0) for each in found.value]
        else:
            grown += len(found.value)
    return bool(waiting)
