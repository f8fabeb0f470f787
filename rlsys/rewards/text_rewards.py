"""Ready-made reward functions of plain text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlsys.data.row_adapters import describe_type
from rlsys.errors import CannotScore
from rlsys.types import Json


def exact(completion: str, answer: Json) -> float:
    """1 if the completion equals the answer, except for surrounding whitespace; else 0."""
    return float(completion.strip() == expected_answer(answer).strip())


def zero() -> float:
    """0 for every completion: the default of algorithms that use no rewards."""
    return 0.0


@dataclass(frozen=True)
class Regex:
    """1 if the match of a regular expression equals the answer, except for surrounding whitespace; else 0.

    `Regex(r"#### (\\S+)")` finds `42` in `6 * 7 = 42, so #### 42`.
    """

    pattern: str
    """Regular expression in Python's syntax. Its first group is compared; without one, the whole match."""
    counts: str = "last"
    """Matches that count: `first`, `last`, or `any`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for invalid fields."""
        _compile_pattern(self.pattern)
        if self.counts not in ("first", "last", "any"):
            raise ValueError(f"counts is {self.counts!r}; give first, last or any")

    def __call__(self, completion: str, answer: Json) -> float:
        """Score one completion."""
        wanted = expected_answer(answer).strip()
        found = [
            match[1 if match.re.groups else 0] or "" for match in _compile_pattern(self.pattern).finditer(completion)
        ]
        if self.counts != "any":
            found = found[:1] if self.counts == "first" else found[-1:]
        return float(any(text.strip() == wanted for text in found))


@dataclass(frozen=True)
class Format:
    """1 if the whole completion matches this pattern, except for surrounding whitespace; else 0.

    Where the chat template begins replies with `<think>` itself, that is a part of the completion.
    """

    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>"
    """Regular expression in Python's syntax; `.` also matches line ends."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for an invalid pattern."""
        _compile_pattern(self.pattern)

    def __call__(self, completion: str, template_opening: str) -> float:
        """Score one completion."""
        reply = (template_opening + completion).strip()
        return float(_compile_pattern(self.pattern).fullmatch(reply) is not None)


def expected_answer(answer: Json) -> str:
    """Return the answer of the task. Raises `CannotScore` if its row has none, or one that is no text."""
    if answer is None:
        raise CannotScore("the row has no answer")
    if not isinstance(answer, str):
        raise CannotScore(f"the answer is {describe_type(answer)}: compare with it in a function of your own")
    return answer


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; `re` caches it. Raises `ValueError`."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
