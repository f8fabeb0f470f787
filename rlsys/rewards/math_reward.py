"""Ready-made reward function for mathematics: the last `\\boxed{}`, compared by math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rlsys.errors import CannotScore
from rlsys.rewards.text_rewards import expected_answer
from rlsys.types import Json

for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)  # hides warnings that its timeouts are off; the worker has one

_BOX = r"\boxed{"
_AS_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)


def math(completion: str, answer: Json) -> float:
    """1 if the last `\\boxed{}` of the completion equals the answer, as `0.5` equals `\\frac12`; else 0.

    The answer is a number, LaTeX, or a worked solution whose result is in a `\\boxed{}` or, as in GSM8K, after `####`.
    Raises `CannotScore` if it has no readable result. A completion without a readable box gets 0.
    """
    gold = expected_answer(answer)
    wanted = _parse_latex(_last_boxed(gold) if _BOX in gold else gold.rpartition("####")[2].strip())
    if not wanted:
        raise CannotScore(f"the answer {gold[:60]!r} cannot be read as mathematics")
    boxed = _last_boxed(completion)
    return float(boxed is not None and verify(list(wanted), list(_parse_latex(boxed)), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _parse_latex(latex: str | None) -> tuple[Any, ...]:
    """Parse LaTeX by math-verify; empty if the result is empty or only plain text.

    Its timeouts need signals of the main thread, so they are off; the deadline of the reward process replaces them.
    """
    if latex is None:
        return ()
    found = parse(f"{_BOX}{latex}}}", extraction_config=_AS_LATEX, parsing_timeout=None)  # type: ignore[arg-type]
    return tuple(found) if any(not isinstance(one, str) for one in found) else ()


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, braces balanced; None if there is none or it is not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOX) : end]
    return None
