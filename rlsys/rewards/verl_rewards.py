"""Ready-made reward function for rows of verl: each is scored as its `data_source` says."""

from __future__ import annotations

import re

from rlsys.errors import CannotScore
from rlsys.rewards.math_reward import math
from rlsys.rewards.text_rewards import expected_answer
from rlsys.rewards.verl_sources import BOXED, GSM8K, is_known
from rlsys.types import Json

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def verl(completion: str, answer: Json, data_source: str) -> float:
    """Score a reply by the rule of its data source.

    | source | a right reply |
    | --- | --- |
    | `openai/gsm8k` | its last `#### ` is followed by the number; 1, else 0 |
    | MATH and Numina | its last `\\boxed{}` equals the answer, by math-verify; 1, else 0 |
    | `math_dapo`, `aime...` | its last `Answer: ` is followed by what equals the answer; 1, else -1 |

    Raises `CannotScore` for any other source.
    """
    wanted = expected_answer(answer)
    if data_source in GSM8K:
        found = _NUMBER.findall(completion)
        return float(bool(found) and found[-1].replace(",", "").rstrip(".") == wanted.strip())
    if data_source in BOXED:
        return math(completion, wanted)
    if is_known(data_source):
        lines = _ANSWER.findall(completion)
        last = lines[-1].strip().strip("$").strip() if lines else ""
        boxed = last if r"\boxed{" in last else rf"\boxed{{{last}}}"
        return 1.0 if lines and math(boxed, wanted) else -1.0
    raise CannotScore(f"no rule for the data_source {data_source!r} is known here: give a function of yours for it")
