"""GRPO in one file, read top to bottom: the maths of rlsys, without the system around it.

One process samples, scores and trains, in turn. It is the numerical oracle of rlsys: at `asynchrony.max_staleness: 0`,
with the same tasks in the same order, rlsys gives these losses and these weights to fp32 rounding. Changes to the maths
are tried here first.

    python -m examples.single_file_grpo --model .cache/sort/seed0/model --tasks .cache/sort/seed0/train.jsonl

Not here: Ray, workers, staleness, a KV cache (every token costs a full forward), shared prompts, micro-batches,
checkpoints, chat templates, multi-turn episodes, a KL term, bfloat16.

Shapes: B samples of the step, in order of their groups; L tokens of the longest prompt and completion, padded on the
right (causal attention never looks right, so no mask is needed); N completion tokens of the step; V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rlsys.util.seeds import group_seed, request_seed
from workers.engines.local.decoder import uniform


@dataclass(frozen=True)
class Settings:
    """Recipe; `examples/sort/run.yaml` has the same values."""

    steps: int = 150
    groups_per_step: int = 32
    group_size: int = 8
    max_new_tokens: int = 7
    temperature: float = 1.0
    lr: float = 3e-4
    warmup_steps: int = 5
    final_lr_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """Report of one optimizer step."""

    loss: float
    reward: float
    """Mean over the step's samples."""


@dataclass
class Completion:
    """One sample: a prompt, the completion, and the logprobs of its tokens at sampling."""

    prompt_ids: list[int]
    seed: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def train(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[tuple[str, str]],
    settings: Settings,
    reward: Callable[[str, str], float],
) -> Iterator[Step]:
    """Train `model` in place, one yield per optimizer step.

    `tasks` are (prompt, answer) in the order in which groups are issued; at least `steps * groups_per_step` of them.
    """
    eos_id = tokenizer.eos_token_id
    assert isinstance(eos_id, int)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0)
    for step in range(settings.steps):
        # Sample: `group_size` completions of every prompt, each with a separate seed.
        group_ids = range(step * settings.groups_per_step, (step + 1) * settings.groups_per_step)
        completions = [
            Completion(tokenizer(tasks[s][0]).input_ids, request_seed(group_seed(settings.seed, s), episode, 0))
            for s in group_ids
            for episode in range(settings.group_size)
        ]
        sample(model, completions, settings, eos_id)

        # Score, and compare each sample with its group: mean 0, unbiased standard deviation 1.
        texts = tokenizer.batch_decode([[i for i in c.output_ids if i != eos_id] for c in completions])
        answers = [tasks[s][1] for s in group_ids for _ in range(settings.group_size)]
        rewards_B = torch.tensor([reward(text, answer) for text, answer in zip(texts, answers, strict=True)])
        rewards_GB = rewards_B.view(-1, settings.group_size)  # (groups, group_size)
        centred_GB = rewards_GB - rewards_GB.mean(1, keepdim=True)
        advantages_B = (centred_GB / (rewards_GB.std(1, keepdim=True) + 1e-6)).flatten()  # (B,)

        # Train: clipped surrogate, every completion token of the step weighs the same.
        logprobs_N = completion_logprobs(model, completions, settings.temperature)
        behavior_N = torch.tensor([logprob for c in completions for logprob in c.logprobs])
        advantages_N = advantages_B.repeat_interleave(torch.tensor([len(c.output_ids) for c in completions]))
        ratio_N = (logprobs_N - behavior_N).exp()
        clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        loss = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        optimizer.step()
        yield Step(loss.item(), rewards_B.mean().item())


@torch.no_grad()
def sample(model: torch.nn.Module, completions: list[Completion], settings: Settings, eos_id: int) -> None:
    """Sample all completions token by token: the first token whose cumulative probability exceeds a uniform number.

    That number is a pure function of (seed, position), so the other samples of a batch cannot change a token.
    """
    running = completions
    for position in range(settings.max_new_tokens):
        if not running:
            return
        rows = [torch.tensor(c.prompt_ids + c.output_ids) for c in running]
        last_B = torch.tensor([len(row) - 1 for row in rows])
        logits_BLV = model(input_ids=pad_sequence(rows, batch_first=True), use_cache=False).logits
        logits_BV = logits_BLV[torch.arange(len(rows)), last_B].float()  # after the last token of each: (running, V)
        logprobs_BV = (logits_BV / settings.temperature).log_softmax(-1)
        seeds_B = torch.tensor([c.seed for c in running])
        cumulative_BV = logprobs_BV.exp().cumsum(-1)
        threshold_B1 = uniform(seeds_B, torch.full_like(seeds_B, position))[:, None] * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0]
        chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]  # (running,)
        for completion, token, logprob in zip(running, tokens_B.tolist(), chosen_B.tolist(), strict=True):
            completion.output_ids.append(token)
            completion.logprobs.append(logprob)
        running = [c for c in running if c.output_ids[-1] != eos_id]


def completion_logprobs(model: torch.nn.Module, completions: list[Completion], temperature: float) -> Tensor:
    """Compute the logprob of every completion token given all before it, with gradient, in order of samples: (N,)."""
    rows = [torch.tensor(c.prompt_ids + c.output_ids) for c in completions]
    ids_BL = pad_sequence(rows, batch_first=True)  # (B, L)
    logits_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, :-1].float() / temperature
    logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]  # (B, L - 1)
    spans = [slice(len(c.prompt_ids) - 1, len(c.prompt_ids) + len(c.output_ids) - 1) for c in completions]
    return torch.cat([row[span] for row, span in zip(logprobs_BL, spans, strict=True)])


def learning_rate(step: int, settings: Settings) -> float:
    """Rise linearly over the warm-up, then fall linearly to `final_lr_fraction` at the end; `step` counts from 0."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (1 - done * (1 - settings.final_lr_fraction))


def run(
    model_path: str | Path,
    tasks: Sequence[tuple[str, str]],
    settings: Settings,
    reward: Callable[[str, str], float] = lambda completion, answer: float(completion == answer),
) -> tuple[list[Step], dict[str, Tensor]]:
    """Load a model, train it and print every step; return the report of each step and the final weights by their
    Hugging Face names."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    steps: list[Step] = []
    for step in train(model, tokenizer, tasks, settings, reward):  # pyrefly: ignore[bad-argument-type]
        steps.append(step)
        print(f"step {len(steps):4}  reward {step.reward:.3f}  loss {step.loss:+.4f}", flush=True)
    return steps, {name: parameter.detach() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face causal language model")
    parser.add_argument("--tasks", type=Path, required=True, help='JSONL of {"prompt": text, "answer": text}')
    parser.add_argument("--steps", type=int, default=Settings.steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = map(json.loads, arguments.tasks.read_text().splitlines())
    run(arguments.model, [(row["prompt"], row["answer"]) for row in rows], Settings(steps=arguments.steps))
