"""The blocks of README.md, by what they are."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    """The blocks in a language, in order."""
    return [text for name, text in BLOCKS if name == language]


def commands() -> list[str]:
    """Every command shown, without its comment."""
    return [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
