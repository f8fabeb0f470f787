"""Make the tiny policy and its tasks: `python -m examples.sort.prepare --out DIR --seed N`.

The policy is warm-started on a *mixture of modes*: half of its demonstrations are correct, a quarter sort in descending
order and a quarter copy the prompt. Like a real base model it can do the task, but not reliably, so reinforcement
learning improves it quickly. The warm start ends when the expected accuracy of samples reaches a target, so that
policies of different seeds start alike.

Writes into DIR: `model/` (safetensors, tokenizer), `train.jsonl`, `eval.jsonl`, and last `prepared.json`, which marks
the rest as complete. A DIR prepared with the same seed and recipe is left as it is.

Shape suffixes: `B` prompts, `T` tokens of one, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples import tiny_policy
from examples.tiny_policy import EOS, Figures, WarmStart

NUM_DIGITS = 6
MARGIN = 0.01
"""A warm start ends within this distance of its target."""


@dataclass(frozen=True, kw_only=True)
class Recipe(WarmStart):
    """Recipe of the prepared files."""

    steps: int = 1200
    """Most steps of the warm start; seeds 0 to 7 reach the target after 240 to 375."""
    target: float = 0.33
    """Expected accuracy of samples on the evaluation rows, at which the warm start ends; within .01."""
    right: float = 0.5
    """Share of demonstrations that sort ascending."""
    descending: float = 0.25
    """Share that sort descending; the rest copy the prompt."""
    num_train: int = 8192
    """Rows of `train.jsonl`, all distinct; 150 steps of 32 use 4,800."""
    num_eval: int = 512
    """Rows of `eval.jsonl`, disjoint from `train.jsonl` and the demonstrations."""


@tiny_policy.once
def prepare(out: Path, recipe: Recipe) -> Figures:
    """Fill `out` unless it is complete for this recipe; return the figures of the warm start.

    The figures: `expected`, `sampled` and `greedy` accuracy on the evaluation rows, `loss` of the last batch, `steps`
    of the warm start, and `cpu_s`.
    """
    evaluation, train, demonstrated = draw_prompts(recipe)
    tokenizer = tiny_policy.build_tokenizer()
    model = tiny_policy.new_model(tokenizer, recipe.seed)
    texts = [*demonstrations(demonstrated, recipe)]
    batches = torch.tensor(tokenizer(texts).input_ids).split(recipe.batch_size)
    answered = ((ids_BT, ids_BT[:, -NUM_DIGITS - 1 :]) for ids_BT in batches)
    approach = Approach(recipe.target, lambda: expected_accuracy(model, tokenizer, evaluation))
    loss, steps = tiny_policy.train_supervised(model, answered, recipe, approach)
    accuracies = {
        "expected": expected_accuracy(model, tokenizer, evaluation),
        "sampled": accuracy(model, tokenizer, evaluation, greedy=False),
        "greedy": accuracy(model, tokenizer, evaluation, greedy=True),
    }
    tiny_policy.save(out / "model", model, tokenizer)
    rows = [{"prompt": prompt, "answer": right_answer(prompt)} for prompt in (*evaluation, *train)]
    tiny_policy.write_tasks(out, rows, recipe.num_eval)
    return {"loss": loss, "steps": steps, **accuracies}


def prepare_seed(seed: int) -> tuple[Path, Figures]:
    """Fill the folder of a seed, such as `.cache/sort/seed0`; return it with the figures of the warm start."""
    folder = Path(".cache/sort") / f"seed{seed}"
    return folder, prepare(folder, Recipe(seed=seed))


def draw_prompts(recipe: Recipe) -> list[list[str]]:
    """Draw disjoint sets of prompts like `385120>`, out of a million: for evaluation, training and demonstrations."""
    sizes = [recipe.num_eval, recipe.num_train, recipe.steps * recipe.batch_size]
    numbers = torch.randperm(10**NUM_DIGITS, generator=torch.Generator().manual_seed(recipe.seed))[: sum(sizes)]
    return [[f"{number:0{NUM_DIGITS}}>" for number in part.tolist()] for part in numbers.split(sizes)]


def right_answer(prompt: str) -> str:
    """`012358` for `385120>`."""
    return "".join(sorted(prompt.removesuffix(">")))


def demonstrations(prompts: Sequence[str], recipe: Recipe) -> Iterator[str]:
    """Yield for each prompt `385120>012358<eos>`, or a wrong variant of it."""
    modes = torch.rand(len(prompts), generator=torch.Generator().manual_seed(recipe.seed + 1))
    for prompt, mode in zip(prompts, modes.tolist(), strict=True):
        answer = right_answer(prompt)
        if mode >= recipe.right:
            answer = answer[::-1] if mode < recipe.right + recipe.descending else prompt.removesuffix(">")
        yield prompt + answer + EOS


@dataclass
class Approach:
    """Learning rate of the warm start, over its peak: it falls with the distance to the target, and is 0 there.

    At a high rate the accuracy jumps by .05 from step to step, so a rate that does not fall would miss the target.
    """

    target: float
    measure: Callable[[], float]
    """Gives the expected accuracy."""
    best: float = field(default=0.0, init=False)

    def __call__(self, step: int) -> float:
        if step % 5 == 0 or self.best > 0.75 * self.target:
            self.best = max(self.best, self.measure())
        if self.best >= self.target - MARGIN / 2:
            return 0.0
        return max(0.03, 1 - self.best / (self.target + MARGIN))


@torch.no_grad()
def expected_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> float:
    """Return the mean probability of the right answer at temperature 1: the accuracy of samples without their noise."""
    ids_BT = torch.tensor(tokenizer([prompt + right_answer(prompt) + EOS for prompt in prompts]).input_ids)
    num = NUM_DIGITS + 1
    logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False, logits_to_keep=num).logits
    logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, -num:, None])[..., 0]
    return logprobs_BT.sum(-1).exp().mean().item()


def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], *, greedy: bool
) -> float:
    """Return the share of exact answers, of one sample each at temperature 1 or of greedy ones."""
    replies = said(model, tokenizer, prompts, greedy=greedy)
    return sum(reply == right_answer(p) + EOS for reply, p in zip(replies, prompts, strict=True)) / len(prompts)


@torch.no_grad()
def said(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], *, greedy: bool
) -> list[str]:
    """Sample one reply to each prompt, special tokens included: `012358<eos>`."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.tensor(tokenizer(list(prompts)).input_ids)
    for _ in range(NUM_DIGITS + 1):
        logits_BV = model(input_ids=ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
        if greedy:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    return tokenizer.batch_decode(ids_BT[:, NUM_DIGITS + 1 :])


if __name__ == "__main__":
    tiny_policy.fill_from_command_line(prepare, Recipe(), __doc__)
