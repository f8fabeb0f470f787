"""Part of `benchmarks.relay`: bytes that are sent of a version after a step, over its whole bytes.

SmolLM2-135M (the tiny sorter with `--short`) takes steps of GRPO on its own answers, and publishes bfloat16 after each.
By learning rate: `sent_share` of the last one; the share of weights that changed; and the seconds that encoding and
decoding of all buckets take, over those that the bytes saved would take at 10 Gbit/s (`time_over_saved`; below 1, a
delta is sooner there).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from benchmarks.measure import Size, engine_spec, group_of, smollm, sorter

if TYPE_CHECKING:
    import numpy as np

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
NUM_STEPS = 4
BYTES_PER_S = 1.25e9
BUCKET_BYTES = 16 << 20
SIZES = {"full": (8, 32), "quick": (8, 16), "short": (4, 4)}
"""Prompts, and tokens of an answer."""


def after_steps(size: Size) -> dict[str, dict[str, float]]:
    """Return the figures for each learning rate."""
    import torch

    from benchmarks.agreement import prompts_of, sampled
    from rlsys.types import Episode

    torch.set_num_threads(1)
    folder = sorter(size) if size == "short" else smollm()
    num_prompts, num_tokens = SIZES[size]
    path = str(folder / "model")
    spec = engine_spec("local", path, "float32", slots=num_prompts, max_context=256)
    episodes: tuple[Episode, ...] = asyncio.run(sampled(spec, prompts_of(folder, num_prompts), num_tokens, [1.0]))[1.0]
    return {f"{lr:g}": _after_steps_at(path, episodes, lr) for lr in LEARNING_RATES}


def _after_steps_at(path: str, episodes: tuple, lr: float) -> dict[str, float]:
    import numpy as np
    import torch

    from algorithms.grpo import GRPO
    from rlsys.algorithm import Aggregation, TrajectoryAdvantage
    from rlsys.batch.packing import plan_batch
    from rlsys.batch.tensors import StepData
    from workers.train.fsdp import FsdpBackend
    from workers.train.optimizer import OptimizerSettings
    from workers.train.rank_group import RankGroup
    from workers.transport.buckets import Snapshot, delta_of, patched

    backend = FsdpBackend(path, OptimizerSettings(lr=lr, total_steps=NUM_STEPS), RankGroup())
    assigned = [TrajectoryAdvantage(e, 0, 1.0 if e % 2 else -1.0) for e in range(len(episodes))]
    plan = plan_batch([group_of(0, episodes)], [assigned], Aggregation(), num_ranks=1, max_tokens=2048)
    snapshot = Snapshot(backend.specs(torch.bfloat16), BUCKET_BYTES)
    old: list[np.ndarray] = []
    for _ in range(NUM_STEPS):
        backend.copy_weights(snapshot.tensors)
        old = _copies(snapshot)
        backend.train_step(plan[0], StepData([episodes], [{}]), GRPO(), temperature=1.0)
    backend.copy_weights(snapshot.tensors)
    num_sent = num_changed = num_words = 0
    seconds = 0.0
    for before, after in zip(old, _copies(snapshot), strict=True):
        began_s = time.perf_counter()
        delta = delta_of(before, after)
        same = after if delta is None else patched(before, delta)
        seconds += time.perf_counter() - began_s
        assert np.array_equal(same, after), "the exact bytes"
        num_sent += after.nbytes if delta is None else delta.nbytes
        num_changed += int((before.view(np.uint16) != after.view(np.uint16)).sum())
        num_words += after.nbytes // 2
    whole = 2 * num_words
    saved_s = (whole - num_sent) / BYTES_PER_S
    return {
        "sent_share": round(num_sent / whole, 5),
        "changed": round(num_changed / num_words, 5),
        "time_over_saved": round(seconds / saved_s, 3) if saved_s else float("inf"),
    }


def _copies(snapshot: object) -> list[np.ndarray]:
    from workers.transport.buckets import Snapshot

    assert isinstance(snapshot, Snapshot)
    return [snapshot.bucket(i).copy() for i in range(len(snapshot.manifest(0).buckets))]
