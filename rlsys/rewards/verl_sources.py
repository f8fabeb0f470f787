"""Data sources of verl's rows that the reward function `verl` scores, by their rule."""

from __future__ import annotations

GSM8K = frozenset({"openai/gsm8k"})
BOXED = frozenset(
    {
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    }
)
ANSWERED = ("math_dapo", "aime")
"""Beginnings of the names of sources whose replies end with a line `Answer: ...`."""


def is_known(data_source: object) -> bool:
    """Return True for a source that `verl` scores."""
    return isinstance(data_source, str) and (data_source in GSM8K | BOXED or data_source.startswith(ANSWERED))
