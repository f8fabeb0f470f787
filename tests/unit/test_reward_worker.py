"""The reward worker: what a user's function does to itself stays with the episode it did it on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlsys.errors import ConfigError, WorkerDied
from rlsys.types import OK, Episode, Outcome, Score, Task, Trajectory, Turn, VersionSpan, failed
from workers.reward import RewardWorker

TASK = Task(id="t", prompt="Sort 21", answer="12", info={"level": "easy"})

JUDGE = """
import os, signal, time

def judge(completion, answer, level):
    match completion:
        case "raise": raise ValueError("no digits")
        case "exit": raise SystemExit(2)
        case "nan": return float("nan")
        case "text": return "good"
        case "hang": time.sleep(60)
        case "die": os._exit(3)
        case "alarm": return alarmed()
    return completion == answer and level == "easy"

def alarmed():
    def ring(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(60)
    except TimeoutError:
        return 0.5
"""


def episode(*texts: str, reward: float | None = None, outcome: Outcome = OK) -> Episode:
    turns = tuple(Turn((1,), (2,), (-0.5,), (VersionSpan(0, 1),), "stop", text) for text in texts)
    return Episode((Trajectory("policy", turns, outcome, reward),))


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "judges.py"
    path.write_text(JUDGE)
    return f"{path}:judge"


@asynccontextmanager
async def worker(spec: str, *, processes: int = 1, timeout_s: float = 5.0) -> AsyncIterator[RewardWorker]:
    worker = RewardWorker(spec, processes, timeout_s)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


def scores(spec: str, *completions: str, timeout_s: float = 5.0) -> tuple[Score, ...]:
    async def judged() -> tuple[Score, ...]:
        async with worker(spec, timeout_s=timeout_s) as judge:
            return await judge.score(TASK, tuple(map(episode, completions)))

    return asyncio.run(judged())


def test_every_misdeed_is_a_score_without_a_value_and_leaves_the_others_alone(spec: str) -> None:
    right, raised, left, nan, text, wrong = scores(spec, "12", "raise", "exit", "nan", "text", "21")
    assert (right, wrong) == (Score(1.0), Score(0.0))
    assert raised.failure == f"raised ValueError: no digits at {spec.removesuffix(':judge')}:6"
    assert left.failure.startswith("raised SystemExit: 2 at ")
    assert nan == Score(None, "returned nan")
    assert text == Score(None, "returned 'good' (str), not a number")


def test_a_hang_costs_only_the_episode_that_hung(spec: str) -> None:
    assert scores(spec, "12", "hang", "21", timeout_s=0.3) == (
        Score(1.0),
        Score(None, "took longer than 0.3 s"),
        Score(0.0),
    )


def test_a_dead_process_costs_only_the_episode_that_killed_it(spec: str) -> None:
    assert scores(spec, "12", "die", "21") == (Score(1.0), Score(None, "process died: exit code 3"), Score(0.0))


def test_a_function_may_use_alarms(spec: str) -> None:
    assert scores(spec, "alarm") == (Score(0.5),)


def test_the_last_turn_of_the_root_agent_is_judged(spec: str) -> None:
    async def judged() -> tuple[Score, ...]:
        async with worker(spec) as judge:
            return await judge.score(TASK, (episode("first try", "12"), episode()))

    assert asyncio.run(judged()) == (Score(1.0), Score(0.0))


def test_what_the_workflow_decided_is_kept(spec: str) -> None:
    given = episode("die", reward=0.25)
    nan = episode("die", reward=float("nan"))
    broken = episode("die", outcome=failed("the environment broke"))

    async def judged() -> tuple[Score, ...]:
        async with worker(spec) as judge:
            return await judge.score(TASK, (given, broken, episode("12"), nan))

    assert asyncio.run(judged()) == (
        Score(0.25),
        Score(None, "the environment broke"),
        Score(1.0),
        Score(None, "returned nan"),
    )


def test_groups_are_judged_in_parallel_and_come_back_in_order(spec: str) -> None:
    async def judged() -> list[tuple[Score, ...]]:
        async with worker(spec, processes=2) as judge:
            groups = [(episode("12" if i % 3 else "21"), episode("12")) for i in range(20)]
            return await asyncio.gather(*(judge.score(TASK, group) for group in groups))

    assert asyncio.run(judged()) == [(Score(float(i % 3 > 0)), Score(1.0)) for i in range(20)]


def test_close_leaves_no_process_behind_even_while_one_hangs(spec: str) -> None:
    async def closed() -> None:
        judge = RewardWorker(spec, processes=2, timeout_s=60)
        await judge.start()
        hung = asyncio.create_task(judge.score(TASK, (episode("hang"),)))
        await judge.score(TASK, (episode("12"),))
        await judge.close()
        await judge.close()
        with pytest.raises(WorkerDied, match="while judging a group"):
            await hung

    asyncio.run(closed())
    assert multiprocessing.active_children() == []


def test_a_broken_pool_is_an_infrastructure_error_not_a_score(spec: str) -> None:
    async def judged_after_close() -> None:
        async with worker(spec) as judge:
            await judge.close()
            await judge.score(TASK, (episode("12"),))

    with pytest.raises(WorkerDied, match="reward while judging a group"):
        asyncio.run(judged_after_close())


def test_a_function_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=f"no such file.*{os.fspath(Path.cwd())}"):
        RewardWorker("nowhere.py:judge", processes=1, timeout_s=1)
