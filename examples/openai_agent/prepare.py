"""The tiny policy of `examples.sort` and its tasks, with a chat template, which conversations need.

python -m examples.openai_agent.prepare --out .cache/openai_agent/seed0 --seed 0
"""

from __future__ import annotations

from pathlib import Path

from examples.sort.prepare import Recipe
from examples.sort.prepare import prepare as prepare_sorter
from examples.tiny_policy import EOS, Figures, build_tokenizer, fill_from_command_line

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
"""Template that joins messages as in the warm start: `385120>853210<eos>385120>`."""


def prepare(out: Path, recipe: Recipe) -> Figures:
    """Fill `out` unless it is complete; return the figures of the warm start."""
    figures = prepare_sorter(out, recipe)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out / "model")
    return figures


if __name__ == "__main__":
    fill_from_command_line(prepare, Recipe(), __doc__)
