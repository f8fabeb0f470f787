"""Reward worker: a failure of a user's function affects only its episode.

A reward model beside the functions is one more part, and its failure is one of the worker.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from rlsys.errors import ConfigError, EndpointDown, WorkerDied
from rlsys.rewards.reward_function import RewardSpec
from rlsys.types import OK, Episode, Outcome, Score, Task, Trajectory, Turn, VersionSpan, failed
from tests.by_day import first_by_day
from tests.processes import is_gone
from workers.reward.reward_process import LimitedOutput
from workers.reward.reward_worker import RewardWorker

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from workers.reward.reward_model import RewardModel

TASK = Task(id="t", prompt="Sort 21", answer="12", info={"level": "easy"})

JUDGE = """
import asyncio, os, signal, subprocess, sys, time

def judge(completion, answer, level):
    match completion:
        case "raise": raise ValueError("no digits")
        case "exit": raise SystemExit(2)
        case "nan": return float("nan")
        case "text": return "good"
        case "hang": time.sleep(60)
        case "die": os._exit(3)
        case "vanish": os._exit(0)
        case "fork": os.fork(); return 0.25
        case "stop": os.kill(os.getpid(), signal.SIGSTOP)
        case "ignore": ignore_signals_and_hang()
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "grow": grow()
        case "crash": os.kill(os.getpid(), signal.SIGSEGV)
        case "large": return len(bytearray(1 << 31))
        case "alarm": return alarmed()
        case started if started.startswith("start "): return start(*started.split()[1:])
    return completion == answer and level == "easy"

def group(completions, completion_ids):
    if "die" in completions: os._exit(3)
    if "hang" in completions: time.sleep(60)
    return [len(completions) + sum(ids) for ids in completion_ids]

def start(file, end):
    sleep = ["sleep", "600"]
    pids = [subprocess.Popen(sleep, start_new_session=apart).pid for apart in (False, True)]
    if not (forked := os.fork()):
        time.sleep(600)
    # neither of the group, nor with the environment, nor a child of this process
    nowhere = "import os; p = os.fork(); p and (print(p, flush=True), os._exit(0)); os.setsid(); os.closerange(0, 64)"
    code = nowhere + "; os.execve('/bin/sleep', ['sleep', '600'], {})"
    pids.append(int(subprocess.check_output([sys.executable, "-c", code], env={}, start_new_session=True)))
    with open(file + ".new", "w") as pid_file:
        print(*pids, forked, file=pid_file)
    os.rename(file + ".new", file)
    if end == "crash": os._exit(3)
    time.sleep(60)

def ignore_signals_and_hang():
    for number in signal.valid_signals() - {9, 19}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)

def grow():
    kept = []
    while True:
        kept.append(bytearray(1 << 24))

async def verl(data_source, solution_str, ground_truth):
    return {"score": 2.0, "acc": solution_str == ground_truth}

begun = []

async def meet(completion):  # the others, of which there are eight
    if completion == "die": os._exit(3)
    if completion == "hang": await asyncio.Event().wait()
    begun.append(completion)
    while completion == "meet" and len(begun) < 8:
        await asyncio.sleep(0.01)
    return 1.0

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


def scored_as(value: float) -> Score:
    return Score(value, parts={"judge": value})


@dataclass
class Lengths:
    """A reward model that says how long a completion is, and breaks on `boom`."""

    weight: float = 0.5

    def score(self, prompt: object, completions: Sequence[str]) -> list[float]:
        if "boom" in completions:
            raise RuntimeError("out of memory")
        return [float("nan") if c == "nan" else float(len(c)) for c in completions]


def model(weight: float = 0.5) -> RewardModel:
    return cast("RewardModel", Lengths(weight))


@pytest.fixture
def spec(tmp_path: Path) -> RewardSpec:
    path = tmp_path / "judges.py"
    path.write_text(JUDGE)
    return RewardSpec(f"{path}:judge", "judge")


@asynccontextmanager
async def worker(
    *specs: RewardSpec,
    concurrency: int | None = None,
    timeout_s: float = 5.0,
    memory_mb: int = 8192,
    model: RewardModel | None = None,
) -> AsyncIterator[RewardWorker]:
    worker = RewardWorker(specs, concurrency, timeout_s, memory_mb=memory_mb, model=model)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.close()


def scores(
    specs: RewardSpec | Sequence[RewardSpec],
    *completions: str,
    timeout_s: float = 5.0,
    memory_mb: int = 8192,
    model: RewardModel | None = None,
) -> tuple[Score, ...]:
    async def scored() -> tuple[Score, ...]:
        given = (specs,) if isinstance(specs, RewardSpec) else specs
        async with worker(*given, timeout_s=timeout_s, memory_mb=memory_mb, model=model) as judge:
            return await judge.score(TASK, tuple(map(episode, completions)))

    return asyncio.run(scored())


def test_faulty_completions_get_no_value_and_leave_others_alone(spec: RewardSpec) -> None:
    right, raised, left, nan, text, wrong = scores(spec, "12", "raise", "exit", "nan", "text", "21")
    assert (right, wrong) == (scored_as(1.0), scored_as(0.0))
    assert raised.failure == f"judge: raised ValueError: no digits at {spec.fn.removesuffix(':judge')}:6"
    assert left.failure.startswith("judge: raised SystemExit: 2 at ")
    assert nan == Score(None, "judge: returned nan")
    assert text == Score(None, "judge: returned 'good' (str), not a number")


def test_a_hang_costs_only_the_episode_that_hung(spec: RewardSpec) -> None:
    assert scores(spec, "12", "hang", "21", timeout_s=0.3) == (
        scored_as(1.0),
        Score(None, "took longer than 0.3 s"),
        scored_as(0.0),
    )


def together(spec: RewardSpec, *completions: str, concurrency: int, timeout_s: float = 5.0) -> list[Score]:
    """Score groups of one completion at the same time, with the function `meet`."""
    meet = replace(spec, fn=spec.fn.replace(":judge", ":meet"))

    async def scored() -> list[Score]:
        async with worker(meet, timeout_s=timeout_s, concurrency=concurrency) as judge:
            asked = (judge.score(TASK, (episode(completion),)) for completion in completions)
            return [score for (score,) in await asyncio.gather(*asked)]

    return asyncio.run(scored())


def test_async_functions_of_several_groups_wait_together(spec: RewardSpec) -> None:
    assert together(spec, *["meet"] * 8, concurrency=8) == [scored_as(1.0)] * 8
    alone = together(spec, *["meet"] * 2, concurrency=1, timeout_s=0.2)
    assert alone == [Score(None, "took longer than 0.2 s")] * 2


@pytest.mark.parametrize(
    ("fault", "why"), [("hang", "took longer than 1 s"), ("die", "its process ended with exit code 3")]
)
def test_a_fault_of_one_group_fails_none_that_waited_with_it(spec: RewardSpec, fault: str, why: str) -> None:
    scored = together(spec, "12", "12", fault, "12", "12", concurrency=8, timeout_s=1.0)
    assert [score for score in scored if score.value is None] == [Score(None, why)] == scored[2:3]


def test_a_dead_process_costs_only_the_episode_that_killed_it(spec: RewardSpec) -> None:
    died = Score(None, "its process ended with exit code 3")
    assert scores(spec, "12", "die", "21") == (scored_as(1.0), died, scored_as(0.0))


def test_a_crash_is_reported_with_its_signal_not_as_a_timeout(spec: RewardSpec) -> None:
    assert scores(spec, "crash") == (Score(None, "its process crashed (SIGSEGV)"),)


ENDS = {
    "die": "its process ended with exit code 3",
    "vanish": "its process ended with exit code 0",
    "crash": "its process crashed (SIGSEGV)",
    "killed": "its process crashed (SIGKILL)",
    "grow": "judge: raised MemoryError",
}


def test_no_end_of_a_process_is_taken_for_another(spec: RewardSpec) -> None:
    ended = scores(spec, *ENDS, timeout_s=60, memory_mb=512)
    assert [str(score.failure).startswith(text) for score, text in zip(ended, ENDS.values(), strict=True)] == [True] * 5
    hung = scores(spec, "hang", "stop", "ignore", timeout_s=1)
    assert [score.failure for score in hung] == ["took longer than 1 s"] * 3


def test_a_child_that_returns_from_the_function_answers_nothing(spec: RewardSpec) -> None:
    assert scores(spec, "fork", "12") == (scored_as(0.25), scored_as(1.0))


def test_a_process_that_ended_between_calls_is_replaced(spec: RewardSpec) -> None:
    others = set(multiprocessing.active_children())

    async def scored() -> tuple[Score, ...]:
        async with worker(spec) as judge:
            (process,) = set(multiprocessing.active_children()) - others
            process.kill()
            assert process.pid is not None and is_gone(process.pid)
            return await judge.score(TASK, (episode("12"),))

    assert asyncio.run(scored()) == (scored_as(1.0),)


def test_a_cancelled_call_ends_its_process(spec: RewardSpec, tmp_path: Path) -> None:
    started = tmp_path / "pids"

    async def scored() -> tuple[Score, ...]:
        async with worker(spec, timeout_s=600) as judge:
            hung = asyncio.create_task(judge.score(TASK, (episode(f"start {started} hang"),)))
            while not started.exists():  # noqa: ASYNC110  (a file of another process sets no event)
                await asyncio.sleep(0.01)
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
            return await judge.score(TASK, (episode("12"),))

    assert asyncio.run(scored()) == (scored_as(1.0),)
    assert all(is_gone(int(pid)) for pid in started.read_text().split())


def test_memory_of_a_function_is_limited(spec: RewardSpec) -> None:
    (large, right) = scores(spec, "large", "12", memory_mb=1024)
    assert large.failure.startswith("judge: raised MemoryError") and right == scored_as(1.0)


@pytest.mark.parametrize("end", first_by_day(["crash", "hang"]))
def test_what_a_function_started_ends_with_its_process(spec: RewardSpec, tmp_path: Path, end: str) -> None:
    started = tmp_path / "pids"
    scores(spec, f"start {started} {end}", timeout_s=5)
    assert all(is_gone(int(pid)) for pid in started.read_text().split())


def test_what_a_function_started_ends_with_a_killed_worker(spec: RewardSpec, tmp_path: Path) -> None:
    started, program = tmp_path / "pids", tmp_path / "worker.py"
    program.write_text(f"""
import asyncio
from tests.unit.workers.reward.test_reward_worker import RewardSpec, scores
if __name__ == "__main__":
    scores(RewardSpec({spec.fn!r}, "judge"), "start {started} hang", timeout_s=60)
""")
    root = Path(__file__).parents[4]
    with subprocess.Popen([sys.executable, program], env={**os.environ, "PYTHONPATH": str(root)}) as worker_process:
        while not started.exists():
            assert worker_process.poll() is None, "it ended before its function started anything"
            time.sleep(0.01)  # a file of another process sets no event
        worker_process.kill()
    assert all(is_gone(int(pid)) for pid in started.read_text().split())


def test_too_much_output_is_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    output = LimitedOutput(multiprocessing.get_context("spawn"), bytes_per_minute=5)
    for text in (b"abc", b"defgh", b"ijk"):
        os.write(output.write.fileno(), text)
    output.close()
    assert capfd.readouterr().err.startswith("abcde\n[more output of reward functions is discarded")


def test_output_of_functions_and_their_children_is_forwarded(
    spec: RewardSpec, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loud.py"
    path.write_text("import os\ndef loud(completion): return os.system(f'echo child; echo {completion} >&2')")
    scores(RewardSpec(f"{path}:loud", "loud"), "12")
    assert capfd.readouterr().err == "child\n12\n"


def test_after_a_hang_completions_are_scored_singly_until_in_time(spec: RewardSpec) -> None:
    """The function says how many completions it was given at once."""
    group = RewardSpec(spec.fn.replace(":judge", ":group"), "group")

    async def scored() -> list[list[float | None]]:
        async with worker(group, timeout_s=1.0) as judge:
            groups = [("a", "hang"), ("a", "hang"), ("a", "b"), ("a", "b")]
            return [[s.value for s in await judge.score(TASK, tuple(map(episode, texts)))] for texts in groups]

    assert asyncio.run(scored()) == [[1 + 2, None], [1 + 2, None], [1 + 2, 1 + 2], [2 + 2, 2 + 2]]


def test_a_function_may_use_alarms(spec: RewardSpec) -> None:
    assert scores(spec, "alarm") == (scored_as(0.5),)


def test_the_last_turn_of_the_root_agent_is_scored(spec: RewardSpec) -> None:
    async def scored() -> tuple[Score, ...]:
        async with worker(spec) as judge:
            return await judge.score(TASK, (episode("first try", "12"), episode()))

    assert asyncio.run(scored()) == (scored_as(1.0), scored_as(0.0))


def test_what_the_workflow_decided_is_kept(spec: RewardSpec) -> None:
    given = episode("die", reward=0.25)
    nan = episode("die", reward=float("nan"))
    broken = episode("die", outcome=failed("the environment broke"))

    async def scored() -> tuple[Score, ...]:
        async with worker(spec) as judge:
            return await judge.score(TASK, (given, broken, episode("12"), nan))

    assert asyncio.run(scored()) == (
        Score(0.25),
        Score(None, "the environment broke"),
        scored_as(1.0),
        Score(None, "returned nan"),
    )


def test_groups_are_scored_in_parallel_and_come_back_in_order(spec: RewardSpec) -> None:
    async def scored() -> list[tuple[Score, ...]]:
        async with worker(spec, concurrency=2) as judge:
            groups = [(episode("12" if i % 3 else "21"), episode("12")) for i in range(20)]
            return await asyncio.gather(*(judge.score(TASK, group) for group in groups))

    assert asyncio.run(scored()) == [(scored_as(float(i % 3 > 0)), scored_as(1.0)) for i in range(20)]


def test_close_leaves_no_process_behind_even_while_one_hangs(spec: RewardSpec) -> None:
    others = set(multiprocessing.active_children())

    async def closed() -> None:
        judge = RewardWorker([spec], concurrency=2, timeout_s=60)
        await judge.start()
        hung = asyncio.create_task(judge.score(TASK, (episode("hang"),)))
        await judge.score(TASK, (episode("12"),))
        await judge.close()
        await judge.close()
        with pytest.raises(WorkerDied, match="while scoring a group"):
            await hung

    asyncio.run(closed())
    assert set(multiprocessing.active_children()) <= others


def test_a_broken_pool_is_an_infrastructure_error_not_a_score(spec: RewardSpec) -> None:
    async def scored_after_close() -> None:
        async with worker(spec) as judge:
            await judge.close()
            await judge.score(TASK, (episode("12"),))

    with pytest.raises(WorkerDied, match="reward while scoring a group"):
        asyncio.run(scored_after_close())


def test_a_server_that_does_not_answer_scores_nothing(spec: RewardSpec) -> None:
    away = RewardSpec("http", "away", args={"url": "http://127.0.0.1:9/score", "retries": 0})
    with pytest.raises(EndpointDown, match=r"127\.0\.0\.1:9/score does not answer: asked 1 times: ") as raised:
        scores([spec, away], "12")
    assert raised.value.endpoint == "http://127.0.0.1:9/score"


def test_a_function_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=f"no such file.*{os.fspath(Path.cwd())}"):
        RewardWorker([RewardSpec("nowhere.py:judge", "judge")], concurrency=1, timeout_s=1)


# ------------------------------------------------------------------------------------------- groups, weights, the model


def test_a_group_function_gets_the_whole_group_with_tokens(spec: RewardSpec) -> None:
    group = RewardSpec(spec.fn.replace(":judge", ":group"), "group")
    assert [score.value for score in scores(group, "a", "b", "c")] == [3 + 2] * 3


def test_a_group_function_that_dies_scores_the_others_alone(spec: RewardSpec) -> None:
    group = RewardSpec(spec.fn.replace(":judge", ":group"), "group")
    first, died, last = scores(group, "a", "die", "c")
    assert first == last == Score(3.0, parts={"group": 3.0})
    assert died == Score(None, "its process ended with exit code 3")


def test_several_functions_make_one_reward(spec: RewardSpec) -> None:
    verl = RewardSpec(spec.fn.replace(":judge", ":verl"), "verl", 0.25)
    right, raised = scores([spec, verl], "12", "raise")
    assert right == Score(1.5, parts={"judge": 1.0, "verl": 2.0, "verl/acc": 1.0})
    assert raised.value is None and raised.failure.startswith("judge: raised ValueError")


def test_a_reward_model_is_one_more_part(spec: RewardSpec) -> None:
    right, nan, died = scores(spec, "12", "nan", "die", model=model())
    assert right == Score(2.0, parts={"judge": 1.0, "model": 2.0})
    assert nan.failure == "judge: returned nan; model: returned nan"
    assert died == Score(None, "its process ended with exit code 3")


def test_a_reward_model_alone_starts_no_process() -> None:
    others = set(multiprocessing.active_children())
    assert scores([], "abc", "", model=model(2.0)) == (
        Score(6.0, parts={"model": 3.0}),
        Score(0.0, parts={"model": 0.0}),
    )
    assert set(multiprocessing.active_children()) <= others


def test_a_broken_reward_model_is_an_infrastructure_error(spec: RewardSpec) -> None:
    with pytest.raises(WorkerDied, match="reward while scoring with the reward model: RuntimeError: out of memory"):
        scores(spec, "12", "boom", model=model())
