"""The reward worker: a user's function in processes that can be killed, with a deadline.

A group is judged in one call. Only if that call hangs or its process dies are its episodes judged one by one, so that
the guilty one alone fails. What the function does wrong is a `Score` without a value; what the machinery does wrong is
raised.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence

from pebble import ProcessExpired, ProcessPool

from rlsys.errors import WorkerDied
from rlsys.rewards.calling import RewardFunction, score_of
from rlsys.types import Episode, Score, Task


class RewardWorker:
    """Judges groups. Plain class: a Ray actor is made of it elsewhere."""

    def __init__(self, fn_spec: str, processes: int, timeout_s: float, *, name: str = "reward") -> None:
        """`timeout_s` bounds the judging of one group, and then of each of its episodes alone.

        Raises `ConfigError` if there is no such function.
        """
        RewardFunction.load(fn_spec)
        self.name, self._timeout_s = name, timeout_s
        self._is_slow = False
        self._room = asyncio.Semaphore(processes)
        self._calls: set[asyncio.Future[list[Score]]] = set()
        self._pool = ProcessPool(
            processes, initializer=_load, initargs=(fn_spec,), context=multiprocessing.get_context("spawn")
        )

    async def start(self) -> None:
        """Start every process; returns once one of them is ready to judge. Without it the first `score` starts them."""
        await self._call(Task(id="", prompt=""), ())

    async def score(self, task: Task, episodes: tuple[Episode, ...]) -> tuple[Score, ...]:
        """One score per episode, in order.

        A reward that the workflow gave is kept, and an episode that failed is not judged. Raises `WorkerDied` if the
        pool of processes itself broke. Takes `timeout_s` at most; after a hang or a death, that much again for every
        `processes` episodes.
        """
        scores = [_known_score(episode) for episode in episodes]
        unjudged = [i for i, score in enumerate(scores) if score is None]
        if unjudged:
            judged = await self._judge(task, [_completion(episodes[i]) for i in unjudged])
            for i, score in zip(unjudged, judged, strict=True):
                scores[i] = score
        return tuple(score for score in scores if score is not None)

    async def close(self) -> None:
        """End every process, whatever it is doing; `score` calls that wait for one raise `WorkerDied`. Idempotent."""
        self._pool.stop()
        await asyncio.to_thread(self._pool.join)
        for call in [c for c in self._calls if not c.done()]:
            call.set_exception(WorkerDied(self.name, "judging a group", "it was closed"))

    async def _judge(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """All at once; one by one after a hang or a death, and from the first hang on: such a judge is slow or
        broken."""
        async with self._room:
            if not self._is_slow:
                try:
                    return await self._call(task, completions)
                except TimeoutError:
                    self._is_slow = True
                except ProcessExpired:
                    pass
            return list(await asyncio.gather(*(self._judge_one(task, c) for c in completions)))

    async def _judge_one(self, task: Task, completion: str) -> Score:
        try:
            return (await self._call(task, [completion]))[0]
        except TimeoutError:
            return Score(None, f"took longer than {self._timeout_s:g} s")
        except ProcessExpired as death:
            return Score(None, f"process died: exit code {death.exitcode}")

    async def _call(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Cancelling it kills the process."""
        try:
            judged = self._pool.schedule(_score_all, args=(task, completions), timeout=self._timeout_s)
            call = asyncio.wrap_future(judged)
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            return await call
        except RuntimeError as error:
            raise WorkerDied(self.name, "judging a group", f"its pool of processes broke: {error!r}") from error


def _known_score(episode: Episode) -> Score | None:
    root = episode.trajectories[0]
    if root.outcome.is_failed:
        return Score(None, root.outcome.reason)
    return None if root.reward is None else score_of(root.reward)


def _completion(episode: Episode) -> str:
    turns = episode.trajectories[0].turns
    return turns[-1].text if turns else ""


# ------------------------------------------------------------------------------------------- in the killable processes


_functions: list[RewardFunction] = []
"""The one function of this process."""


def _load(spec: str) -> None:
    _functions.append(RewardFunction.load(spec))


def _score_all(task: Task, completions: Sequence[str]) -> list[Score]:
    return [_functions[0].score(task, completion) for completion in completions]
