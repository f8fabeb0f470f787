"""A tiny policy for agents of frameworks, and its tasks.

python -m examples.agent_frameworks.prepare --out .cache/agent_frameworks/seed0 --seed 0

It answers a request of openai-agents with digits, `385120>012358`, and one of smolagents with code that smolagents
runs, `New task: 385120><code>final_answer("012358")</code>`. The tiny policy cannot read the instructions of the
frameworks, so its chat template shows it the task alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from examples import tiny_policy
from examples.sort.prepare import Recipe, demonstrations, draw_prompts, right_answer
from examples.tiny_policy import EOS, Figures

TASK, CODE, END = "New task:\n", '<code>\nfinal_answer("', '")\n</code>'
"""The mark of smolagents before a task, and what stands around its answer; a token each."""
TEMPLATE = "{{ (messages | selectattr('role', 'equalto', 'user') | first).content | trim }}"


@tiny_policy.once
def prepare(out: Path, recipe: Recipe) -> Figures:
    """Fill `out` unless it is complete for this recipe; return the last loss of the warm start."""
    evaluation, train, demonstrated = draw_prompts(recipe)
    tokenizer = tiny_policy.build_tokenizer()
    tokenizer.add_tokens([TASK, CODE, END])
    tokenizer.chat_template = TEMPLATE
    model = tiny_policy.new_model(tokenizer, recipe.seed)
    texts = [*demonstrations(demonstrated, recipe)]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(recipe.steps):
            in_code = step % 2 == 1
            part = texts[step * recipe.batch_size :][: recipe.batch_size]
            ids_BT = torch.tensor(tokenizer([written(text, in_code=in_code) for text in part]).input_ids)
            yield ids_BT, ids_BT[:, len("385120>") + in_code :]

    loss, _ = tiny_policy.train_supervised(model, batches(), recipe)
    tiny_policy.save(out / "model", model, tokenizer)
    rows = [{"prompt": prompt, "answer": right_answer(prompt)} for prompt in (*evaluation, *train)]
    tiny_policy.write_tasks(out, rows, recipe.num_eval)
    return {"loss": loss}


def written(text: str, *, in_code: bool) -> str:
    """Return a demonstration in one of the two forms.

    >>> written("385120>012358<eos>", in_code=False)
    '385120>012358<eos>'
    """
    prompt, mark, answer = text.partition(">")
    digits = answer.removesuffix(EOS)
    return f"{TASK}{prompt}{mark}{CODE}{digits}{END}{EOS}" if in_code else text


if __name__ == "__main__":
    tiny_policy.fill_from_command_line(prepare, Recipe(steps=500), __doc__)
