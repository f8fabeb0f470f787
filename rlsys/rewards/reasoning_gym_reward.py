"""Ready-made reward function for reasoning-gym's tasks: the data set that made a task scores it.

A row is an entry of such a data set, unchanged; its question is the prompt:

    {"question": "What is 2 + 3?", "answer": "5", "metadata": {"source_dataset": "basic_arithmetic", ...}}

This writes a file of them:

    for entry in reasoning_gym.create_dataset("basic_arithmetic", size=1000, seed=0):
        file.write(json.dumps(entry, default=str) + "\\n")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reasoning_gym import get_score_answer_fn  # type: ignore[import-not-found]
from reasoning_gym.utils import extract_answer  # type: ignore[import-not-found]

from rlsys.errors import CannotScore
from rlsys.types import Prompt


@dataclass(frozen=True)
class ReasoningGymReward:
    """Score from 0 to 1 by the data set that made the task."""

    tag: str = "answer"
    """Tag of the answer: the last `<answer>...</answer>` of the completion is scored; without one, all of it."""

    def __call__(self, completion: str, answer: str, metadata: Mapping[str, Any], prompt: Prompt) -> float:
        """Score one completion. Raises `CannotScore` if the row does not name its data set."""
        name = metadata.get("source_dataset")
        if not isinstance(name, str):
            raise CannotScore("the row's `metadata` has no `source_dataset`")
        extracted = extract_answer(completion, tag_name=self.tag)
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        entry = {"question": question, "answer": answer, "metadata": dict(metadata)}
        return float(
            get_score_answer_fn(name)(answer=completion.strip() if extracted is None else extracted, entry=entry)
        )
