"""Deaths of a rank inside collectives: which there are in a step, and whether a run recovers from a death in each.

`StruckRanks` is the algorithm of such a run. Its ranks notice every collective that they enter, by its name and the
method of a worker that leads to it, such as `all_reduce in Sharded.update`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic.dataclasses import dataclass as checked

from algorithms.corrections import Policies
from algorithms.fields import RULES
from algorithms.grpo import GRPO
from benchmarks.disturbed_run import DisturbedRun
from benchmarks.measure import POLL_S, progress, spread, train_command
from rlsys.algorithm import LossOutput

MESHES: dict[str, Sequence[str]] = {
    "shard 2": ["train.mesh.shard=2"],
    "replicate 2": ["train.mesh.replicate=2"],
    "tensor 2": ["train.mesh.tensor=2"],
    "context 2": ["train.mesh.context=2"],
    "expert 2": ["train.mesh.shard=2", "train.mesh.expert=2"],
    "shard 4": ["train.mesh.shard=4"],
    "replicate 2 x shard 2": ["train.mesh.replicate=2", "train.mesh.shard=2"],
    "shard 2 x tensor 2": ["train.mesh.shard=2", "train.mesh.tensor=2"],
    "shard 2 x context 2": ["train.mesh.shard=2", "train.mesh.context=2"],
    "expert 4": ["train.mesh.shard=4", "train.mesh.expert=4"],
}
"""Overrides of a run by mesh, each of 2 or 4 ranks."""
DEADLY = 1
"""The rank that dies."""
ORDER, SEEN = "order", "seen"
"""Files in the folder of a run's orders: the place to die at, and the places that a rank met."""
NUM_STEPS = 20
"""Steps of a run, and `STEPS_A_KILL` more for each death."""
STEPS_A_KILL = 8
LIMIT_S, MEET_S = 240.0, 60.0


@checked(frozen=True, kw_only=True, config=RULES)
class StruckRanks(GRPO):
    """GRPO with a rank that ends its process in the collective that a file names."""

    orders: str
    """Folder of the orders."""

    def surrogate(self, policies: Policies) -> LossOutput:
        from torch.distributed import get_rank, is_initialized

        if is_initialized() and get_rank() == DEADLY and sys.getprofile() is None:
            watch = _Watch(Path(self.orders))
            threading.setprofile(watch)
            sys.setprofile(watch)
        return super().surrogate(policies)


class _Watch:
    """Profiler of a rank, which meets all collectives of its threads."""

    def __init__(self, orders: Path) -> None:
        from torch.distributed import _functional_collectives, distributed_c10d

        self._order, self._seen_in = orders / ORDER, orders / SEEN
        self._seen: set[str] = set()
        self._files = {_functional_collectives.__file__, distributed_c10d.__file__}
        self._names = ("all_", "reduce_scatter", "broadcast", "gather", "scatter", "barrier")

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename not in self._files or not code.co_name.startswith(self._names):
            return
        place = f"{code.co_name} in {_method_of_worker(frame)}"
        if place not in self._seen:
            self._seen.add(place)
            with self._seen_in.open("a") as file:
                file.write(f"{place}\n")
        if self._order.exists() and self._order.read_text() == place:
            self._order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def _method_of_worker(frame: FrameType | None) -> str:
    """Name the innermost method of `workers` that leads to `frame`; of torch's, in a thread of its own."""
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("workers.") and module != "workers.train.rank_group":
            return frame.f_code.co_qualname.replace(".<locals>", "")
        if module.startswith("torch.distributed.checkpoint"):
            found = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
        frame = frame.f_back
    return found or "another thread"


def any_text(completion: str) -> float:
    """Return a reward from 0 to 1 that any two texts differ in, so that every group has something to learn from."""
    return zlib.crc32(completion.encode()) / 2**32


def write_experts(source: Path, folder: Path) -> None:
    """Write an untrained model with experts and the tokenizer of the model in `source`."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from workers.model.model_loading import load_tokenizer

    tokenizer = load_tokenizer(str(source))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Kills:
    """Deaths in collectives, over any number of meshes."""

    prepared: Path
    """Folder of the policy and its tasks."""
    folder: Path
    tried: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def strike(self, mesh: str, most: int) -> None:
        """Kill a rank in collectives of a step with this mesh, one after the other, in `most` places at most; compare
        the final weights with those of a run in which nothing dies."""
        calm = self._run(mesh, "calm", NUM_STEPS + STEPS_A_KILL * most)
        try:
            code = calm.finish(LIMIT_S)
        finally:
            calm.kill()
        assert code == 0, calm.console[-4000:]
        places = sorted((calm.folder.parent / f"orders-{calm.folder.name}" / SEEN).read_text().split("\n")[:-1])
        chosen = [places[i * len(places) // most] for i in range(most)] if len(places) > most else places
        struck = self._run(mesh, "struck", NUM_STEPS + STEPS_A_KILL * most)
        orders = struck.folder.parent / f"orders-{struck.folder.name}"
        try:
            step_s = struck.wait_steps(4, LIMIT_S)
            for place in chosen:
                self.tried.append(f"{mesh}: {place}")
                order = orders / ORDER
                order.with_suffix(".new").write_text(place)
                order.with_suffix(".new").rename(order)
                until = time.monotonic() + MEET_S
                while order.exists() and time.monotonic() < until:
                    time.sleep(POLL_S)  # a process that is killed notifies nobody
                if order.exists():  # a place of the beginning of a run
                    order.unlink()
                    self.tried.pop()
                    continue
                self.recovery_s.append(struck.wait_recovered("actor", time.time(), step_s, LIMIT_S))
                progress(f"{self.tried[-1]}: {self.recovery_s[-1]:.1f} s")
            code = struck.finish(LIMIT_S)
            ends = [_final_hash(run.events) for run in (calm, struck)]
            if code or ends[0] != ends[1]:
                self.broken.append(f"{mesh}: exit code {code}, final weights {ends[1]} instead of {ends[0]}")
        except RuntimeError as error:
            self.broken.append(f"{self.tried[-1]}: {error}")
        finally:
            struck.kill()

    def _run(self, mesh: str, name: str, steps: int) -> DisturbedRun:
        run_name = f"{name}-{mesh.replace(' ', '_')}"
        orders = self.folder / f"orders-{run_name}"
        orders.mkdir()
        model = self.prepared / "model"
        if "expert" in mesh:
            model = self.folder / "experts"
            if not model.exists():
                write_experts(self.prepared / "model", model)
        command = train_command(
            self.prepared, self.folder, f"run.name={run_name}", f"model.path={model}", f"run.steps={steps}",
            "ray=local", "reward.fn=benchmarks.collective_kills:any_text", "train.groups_per_step=4",
            "algorithm.type=benchmarks.collective_kills:StruckRanks", f"algorithm.orders={orders}",
            "checkpoint.every=2", "checkpoint.keep_last=2", "record.rollouts_every=0", "train.micro_batch_tokens=256",
            *MESHES[mesh],
        )  # fmt: skip
        run = DisturbedRun(command, self.folder / run_name)
        run.start()
        return run

    def figures(self) -> Mapping[str, Any]:
        """Return the part of the result line."""
        share = (len(self.tried) - len(self.broken)) / len(self.tried)
        return {
            "tried": self.tried,
            "recovered_share": share,
            "recovery_s": spread(self.recovery_s),
            "broken": self.broken,
        }


def _final_hash(events: Sequence[Mapping[str, Any]]) -> str:
    return [line["hash"] for line in events if line["kind"] == "weights_published"][-1]
