"""Cost of gradient alignment control: its share of a training step, and its memory.

    python -m benchmarks.gac [--quick | --short]

In one process, steps of the same back-end on the same batch alternate between no stabilizer, one that observes (the
default of every run), one that projects every gradient, and one that projects every update. The models are the tiny
sorter at the batch of `examples/sort`, and a random Llama of the shape of SmolLM2-135M at a small batch of 1,280
positions. The cost of the stabilizer depends only on the parameters, so its share falls with the tokens of a step.

`gac_ms` is the CPU time inside the stabilizer in a step, `share` all of it over that of all steps. Every tenth step
measures the update's cosine as well, so steps are counted in tens. `over_none` compares the medians of whole steps
instead, noise included. `--quick` leaves the Llama out, which takes ten minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from algorithms.gac import GAC, Alignment
from algorithms.grpo import GRPO
from benchmarks.measure import Size, group_of, in_turn, parser_of, print_result, sorter, spreads, timed
from rlsys.batch.packing import BatchPlan, plan_batch
from rlsys.batch.tensors import StepData
from rlsys.stabilizer import GradientDecision, Updates
from rlsys.types import Distribution, Episode, Trajectory, Turn, VersionSpan
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

if TYPE_CHECKING:
    from torch import Tensor

    from rlsys.stabilizer import AllReduce, Gradients

ALWAYS = {"enabled": True, "c_low": 0.0, "c_high": 1.0}
STABILIZERS = {
    "none": None,
    "observing": GAC(),
    "projecting gradients": GAC(**ALWAYS),
    "projecting updates": GAC(**ALWAYS, where="update"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Model, and the batch of a step."""

    name: str
    path: Path
    num_vocab: int
    groups: int
    group_size: int
    num_tokens: int
    """Tokens of a prompt, and as many of an output."""
    num_steps: int
    """Number of measured steps of each kind."""


class Timed(Alignment):
    """Gradient alignment control that counts the CPU seconds spent in it."""

    def __init__(self, config: GAC, shapes: Mapping[str, Tensor]) -> None:
        super().__init__(config, shapes)
        self.cpu_s: list[float] = []

    def steer(
        self, gradients: Gradients, squared_norm: float, all_reduce: AllReduce, staleness: float
    ) -> GradientDecision:
        with timed(self.cpu_s, time.process_time):
            return super().steer(gradients, squared_norm, all_reduce, staleness)

    def correct(self, updates: Updates, all_reduce: AllReduce) -> Mapping[str, float]:
        with timed(self.cpu_s, time.process_time):
            return super().correct(updates, all_reduce)


def main() -> None:
    """Measure both models and print the result line."""
    size = parser_of(__doc__, quick="the tiny model alone").parse_args().size
    torch.set_num_threads(1)
    print_result({case.name: measured(case) for case in cases(size)})


def cases(size: Size) -> list[Case]:
    """Return the cases; models are made where they are missing."""
    tiny = Case(
        name="sorter, 0.44 M", path=sorter(size) / "model", num_vocab=90,
        groups=32, group_size=8, num_tokens=7, num_steps=1 if size == "short" else 30,
    )  # fmt: skip
    if size != "full":
        return [tiny]
    llama = Case(
        name="llama, 135 M", path=random_llama(), num_vocab=49152,
        groups=4, group_size=4, num_tokens=64, num_steps=10,
    )  # fmt: skip
    return [tiny, llama]


def random_llama() -> Path:
    """Write a model of the shape of SmolLM2-135M with random weights."""
    folder = Path(".cache/gac/llama")
    if not (folder / "model.safetensors").exists():
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measured(case: Case) -> dict[str, object]:
    """Measure the figures of one model."""
    backend = FsdpBackend(str(case.path), OptimizerSettings(lr=1e-6, total_steps=10**6), RankGroup())
    algorithm = GRPO(group_size=case.group_size)
    plan, data = batch(case, algorithm)
    shards = backend.shards()
    timers = {name: Timed(gac, shards) for name, gac in STABILIZERS.items() if gac}
    gradient_bytes = sum(4 * shard.numel() for shard in shards.values())

    def step(_: int, name: str) -> dict[str, float]:
        gac_s, step_s = timers[name].cpu_s if name in timers else [], []
        gac_s.clear()
        with timed(step_s, time.process_time):
            backend.train_step(plan[0], data, algorithm, distribution=Distribution(1.0), stabilizer=timers.get(name))
        return {"step_ms": 1e3 * sum(step_s), "gac_ms": 1e3 * sum(gac_s)}

    rounds = in_turn(case.num_steps + 1, STABILIZERS, step)
    runs = {name: steps[1:] for name, steps in rounds.items()}  # the first allocates memory that later ones reuse
    figures = {name: spreads(steps) for name, steps in runs.items()}
    step_ms = {name: each["step_ms"] for name, each in figures.items()}
    found: dict[str, object] = {
        name: {
            "gac_ms": figures[name]["gac_ms"],
            "share": round(fmean(s["gac_ms"] for s in runs[name]) / fmean(s["step_ms"] for s in runs[name]), 4),
            "over_none": round(step_ms[name]["median"] / step_ms["none"]["median"] - 1, 4),
            "state_over_gradient": sum(t.nbytes for t in timer.state_dict().values()) / gradient_bytes,
        }
        for name, timer in timers.items()
    }
    num_positions = case.groups * case.num_tokens * (1 + case.group_size)
    return {"tokens": num_positions, "gradient_bytes": gradient_bytes, "step_ms": step_ms, **found}


def batch(case: Case, algorithm: GRPO) -> tuple[BatchPlan, StepData]:
    """Build a batch of random prompts, completions and rewards."""
    chance = random.Random(0)
    payloads: list[tuple[Episode, ...]] = []
    for _ in range(case.groups):
        prompt = tuple(chance.randrange(2, case.num_vocab) for _ in range(case.num_tokens))
        payloads.append(tuple(_episode(chance, case, prompt) for _ in range(case.group_size)))
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    assigned = algorithm.finalize_advantages(groups, {}).groups
    plan = plan_batch(groups, assigned, algorithm.aggregation, num_ranks=1, max_tokens=8192)
    return plan, StepData(payloads, [{} for _ in groups])


def _episode(chance: random.Random, case: Case, prompt: tuple[int, ...]) -> Episode:
    output = tuple(chance.randrange(2, case.num_vocab) for _ in range(case.num_tokens))
    logprobs = tuple(-5 - chance.random() for _ in output)
    turn = Turn(prompt, output, logprobs, (VersionSpan(0, len(output)),), "length", "")
    return Episode((Trajectory("policy", (turn,), reward=chance.random()),))


if __name__ == "__main__":
    main()
