"""Retention by an evaluation: the best checkpoints stay, whatever happens around them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.loop.checkpoint import Checkpoints, copy_and_write
from rlsys.loop.checkpoint_files import step_of
from rlsys.loop.checkpoint_scores import BestCheckpoints
from tests.unit.loop.test_checkpoint import Written, state_of

METRIC = "eval/held_out/mean"
scores_by_step = st.lists(st.none() | st.floats(allow_nan=True), min_size=1, max_size=12)


def best_of(count: int = 2, *, is_highest: bool = True, every: int = 1) -> BestCheckpoints:
    return BestCheckpoints(count, METRIC, is_highest, every)


def is_score(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


@given(scores_by_step, st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(derandomize=True)
def test_the_best_of_all_steps_survive_every_retirement(found, count, keep_last, is_highest):
    """Retirement sees only what earlier retirements left, and the score of a step comes after its checkpoint."""
    checkpoints = Checkpoints(Path("none"), 1, keep_last, best=best_of(count, is_highest=is_highest))
    there: list[int] = []
    for step, value in enumerate(found, 1):
        there = [step, *there]
        there = [each for each in there if each in checkpoints.steps_to_keep(there)]
        checkpoints.best.add(step, {METRIC: value, "eval/other/mean": 1e9})
    sign = 1 if is_highest else -1
    scored = sorted((sign * value, step) for step, value in enumerate(found, 1) if is_score(value))
    best = {step for _, step in scored[max(0, len(scored) - count) :]}
    kept = checkpoints.steps_to_keep(there)
    assert best <= kept
    assert kept == best | {*range(len(found), max(0, len(found) - keep_last), -1)}


@given(scores_by_step, st.integers(1, 4), st.booleans())
@settings(derandomize=True)
def test_a_run_stops_early_as_a_counter_of_evaluations_would(found, patience, is_highest):
    """The rule of Hugging Face's `EarlyStoppingCallback`, whose state is a counter and the best value."""
    best = BestCheckpoints(1, METRIC, is_highest, 1, patience)
    counter, best_value = 0, None
    for step, value in enumerate(found):
        best.add(step, {METRIC: value})
        better = is_score(value) and (best_value is None or (value > best_value if is_highest else value < best_value))
        counter, best_value = (0, value) if better else (counter + 1, best_value)
        assert bool(best.early_stop) == (counter >= patience)
        assert not BestCheckpoints(1, METRIC, is_highest, scores=best.scores).early_stop


def test_a_step_waits_for_its_evaluation(tmp_path):
    best = best_of(1, every=2)
    checkpoints = Checkpoints(tmp_path, 1, keep_last=1, best=best)
    for step in range(1, 6):
        save(checkpoints, step)
    assert steps_in(tmp_path) == [2, 4, 5]
    best.add(4, {METRIC: 0.5})
    save(checkpoints, 6)
    assert steps_in(tmp_path) == [4, 6]


def save(checkpoints: Checkpoints, step: int) -> None:
    async def both() -> None:
        await copy_and_write(checkpoints.save(step, state_of(step), Written))

    asyncio.run(both())


def steps_in(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in folder.glob("step_*"))


def test_evaluated_steps_are_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, 0, keep_last=1, best=best_of(every=3))
    assert [step for step in range(1, 10) if checkpoints.is_due(step, 0.0, is_last=False)] == [3, 6, 9]


def test_scores_survive_a_resume_with_the_same_metric():
    before, after, other = best_of(), best_of(), BestCheckpoints(2, "eval/held_out/pass@1", every=1)
    before.add(3, {METRIC: 0.25})
    for resumed in (after, other):
        resumed.restore(before.state())
    assert (after.scores, other.scores) == ({3: 0.25}, {})
