"""The reward worker: user functions in killable processes with a deadline, and optionally a reward model.

A group is scored in one call. If that call hangs or its process dies, its episodes are scored one by one, so that only
the faulty one fails. An error in a function becomes a `Score` without a value. A failure of the infrastructure,
including the reward model, is raised.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Self, TypeAlias

from rlsys.batch.samples import versions_of
from rlsys.contracts import GroupScores, Replacement, with_episode
from rlsys.errors import PayloadLost, WorkerDied
from rlsys.rewards.reward_function import (
    MODEL,
    RewardInput,
    RewardSpec,
    RewardSum,
    check_answered,
    judged_agents,
    known_score,
    score_of,
    total,
    weight_score,
)
from rlsys.types import Busy, Episode, Group, Score, Task, VersionSpan
from rlsys.util.deadlines import remote
from workers.ray.call_stream import Parcel, PayloadRef, answer_in_chunks
from workers.ray.cluster import Resources
from workers.ray.fault_tolerant_pool import Pool, PoolMember, PoolSpec
from workers.ray.worker_process import Chunks, Remote
from workers.reward.process_pool import CallPool, PoolBroken, ProcessEnded
from workers.reward.reward_process import LimitedOutput, confine

if TYPE_CHECKING:
    from rlsys.config.reward_section import RewardItem
    from workers.reward.reward_model import RewardModel

ScoreRequest: TypeAlias = "tuple[Task, Sequence[RewardInput]]"
"""A task, with completions to score."""
Functions: TypeAlias = "CallPool[list[list[Score]]]"
"""The processes in which a user's functions run."""
_OUTPUT_BYTES_PER_MINUTE = 1_000_000
ASYNC_CONCURRENCY = 64
"""Groups whose async functions wait together, unless the configuration says otherwise."""


class RewardWorker:
    """Scores groups. Functions run in killable child processes, a reward model in the worker's process."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        concurrency: int | None,
        timeout_s: float,
        *,
        memory_mb: int = 8192,
        model: RewardModel | None = None,
        name: str = "reward",
    ) -> None:
        """`timeout_s` bounds the scoring of one group by the functions, and then of each single episode; `memory_mb`
        bounds the memory of each process. `concurrency` groups are scored at once: in one process if a function is
        async, else each in its own. None: `ASYNC_CONCURRENCY` or 1.

        With a `model`, its value is one more part of the reward, and there may be no functions. Raises `ConfigError` if
        a function cannot be found.
        """
        asked = RewardSum(specs)
        self._wants_ids, self._wants_episodes = asked.wants_ids, asked.wants_episodes
        self.name, self._timeout_s = name, timeout_s
        self._late = Score(None, f"took longer than {timeout_s:g} s")
        self._is_slow = False
        """True if the last group had a timeout: the next group is scored one by one."""
        processes, self._batch_size = (1, concurrency or ASYNC_CONCURRENCY) if asked.is_async else (concurrency or 1, 1)
        self._room = asyncio.Semaphore(processes)
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[list[Score]]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[object]] = set()
        self._pool, self._output = None, None
        if specs:
            self._output = LimitedOutput(multiprocessing.get_context("spawn"), _OUTPUT_BYTES_PER_MINUTE)
            self._pool = CallPool(_score_all, processes, timeout_s, _load, (specs, memory_mb, self._output.write))
        self._processes = processes
        self._model, self._model_thread = model, ThreadPoolExecutor(1, thread_name_prefix=MODEL)

    @classmethod
    async def of(
        cls,
        name: str,
        specs: Sequence[RewardSpec],
        concurrency: int | None,
        timeout_s: float,
        model: RewardItem | None,
        resources: Resources,
    ) -> Self:
        """Load the model, if there is one, and start every process."""
        loaded = None
        if model is not None:
            from rlsys.config.reward_section import RewardModelSection
            from workers.reward.reward_model import RewardModel

            given = RewardModelSection.model_validate(model.args)
            loaded = RewardModel(given.path, given.dtype, given.max_tokens, model.weight, resources.claim())
        worker = cls(specs, concurrency, timeout_s, model=loaded, name=name)
        await worker.start()
        return worker

    async def start(self) -> None:
        """Start every process. Returns once one of them is ready. Without this call, the first `score` starts them."""
        if self._pool is not None:
            calls = [self._call(self._pool, []) for _ in range(self._processes)]
            self._starting = {asyncio.ensure_future(call) for call in calls}
            ready, _ = await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
            for start in ready:
                start.result()

    async def score_each(self, tasks: Sequence[Task], parcel: Parcel) -> AsyncIterator[object]:
        """Score groups, one per task; see `answer_in_chunks`."""
        requests = list(zip(tasks, await parcel.each(), strict=True))
        async for part in answer_in_chunks(requests, self._score_payload):
            yield part

    async def _score_payload(self, request: tuple[Task, tuple[Episode, ...] | PayloadLost]) -> tuple[GroupScores, None]:
        task, payload = request
        if isinstance(payload, PayloadLost):
            raise payload
        start_s = time.monotonic()
        scores = await self.score(task, payload)
        return GroupScores(scores, Busy(self.name, start_s, time.monotonic())), None

    @remote("replacing an episode of group {parcel.entries[0][0]}")
    async def replace_episode(
        self, parcel: Parcel, episode: int, donor_episode: int, policy: str
    ) -> tuple[tuple[VersionSpan, ...], tuple[tuple[Episode, ...], ...]]:
        """Replace an episode of the first of two payloads by one of the second. Returns the versions that `policy`
        sampled in the other episodes, and a chunk with the new payload. Raises `PayloadLost`."""
        payloads = await parcel.each()
        if lost := [
            group_id for payload in payloads if isinstance(payload, PayloadLost) for group_id in payload.group_ids
        ]:
            raise PayloadLost(tuple(lost))
        group, donor = payloads
        own = (*group[:episode], *group[episode + 1 :])
        return versions_of(own, policy), (with_episode(group, episode, donor[donor_episode]),)

    def _input(self, episode: Episode, trajectory: int = 0) -> RewardInput:
        return RewardInput.of(episode, trajectory, with_ids=self._wants_ids, with_episode=self._wants_episodes)

    async def score(self, task: Task, episodes: tuple[Episode, ...]) -> tuple[Score, ...]:
        """One score per episode, in order.

        A reward from the workflow is kept, and a failed episode is not scored. Raises `WorkerDied` if the process pool
        or the reward model broke, `EndpointDown` if a function's server does not answer. Functions take at most
        `timeout_s`; after a hang or a death, that time again for as many episodes as there are processes.
        """
        scores = [known_score(episode) for episode in episodes]
        unjudged = [i for i, score in enumerate(scores) if score is None]
        if unjudged:
            scored = await self._judge(task, [self._input(episodes[i]) for i in unjudged])
            for i, score in zip(unjudged, scored, strict=True):
                scores[i] = score
        judged = judged_agents(episodes)
        others: list[dict[int, Score]] = [{} for _ in episodes]
        if judged:  # by a call of their own: functions of a group compare roots with roots
            scored = await self._judge(task, [self._input(episodes[e], t) for e, t in judged])
            for (e, t), score in zip(judged, scored, strict=True):
                others[e][t] = score
        pairs = zip(scores, others, strict=True)
        whole = tuple(replace(score, others=own) if own else score for score, own in pairs if score is not None)
        check_answered(whole)
        return whole

    async def close(self) -> None:
        """End every process at once; pending `score` calls raise `WorkerDied`. Idempotent."""
        self._model_thread.shutdown(wait=False)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
            await asyncio.gather(*self._starting, return_exceptions=True)
        if self._output is not None:
            await asyncio.to_thread(self._output.close)

    async def _judge(self, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Scores of the functions and the model, computed concurrently."""
        judges: list[Awaitable[list[Score]]] = []
        if self._pool is not None and self._batch_size > 1:
            judges.append(self._score_in_batch(self._pool, (task, completions)))
        elif self._pool is not None:
            judges.append(self._by_functions(self._pool, task, completions))
        if self._model is not None:
            judges.append(self._by_model(self._model, task, completions))
        return [total(scores) for scores in zip(*await asyncio.gather(*judges), strict=True)]

    async def _by_model(self, model: RewardModel, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Score in a separate thread, one group at a time, so that the event loop stays free."""
        loop, texts = asyncio.get_running_loop(), [c.text for c in completions]
        try:
            logits = await loop.run_in_executor(self._model_thread, model.score, task.prompt, texts)
        except RuntimeError as error:
            raise WorkerDied(self.name, "scoring with the reward model", f"{type(error).__name__}: {error}") from error
        return [weight_score(score_of(logit), MODEL, model.weight) for logit in logits]

    async def _score_in_batch(self, pool: Functions, asked: ScoreRequest) -> list[Score]:
        """Score a group together with those that wait, in the next free process."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        if len(self._senders) < self._processes:
            sender = asyncio.create_task(self._score_waiting(pool))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await answer

    async def _score_waiting(self, pool: Functions) -> None:
        """Score the groups that wait, as many together as may be. Waits for a process; ends when no group waits."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
            try:
                scored = await self._score_batch(pool, [asked for asked, _ in batch])
            except WorkerDied as death:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(death)
                continue
            for (_, answer), scores in zip(batch, scored, strict=True):
                if not answer.done():
                    answer.set_result(scores)

    async def _score_batch(self, pool: Functions, asked: Sequence[ScoreRequest]) -> list[list[Score]]:
        """Score groups in one call; after a hang or a death, each half of them in a call of its own."""
        if len(asked) == 1:
            return [await self._by_functions(pool, *asked[0])]
        try:
            async with self._room:
                return await self._call(pool, asked)
        except (TimeoutError, ProcessEnded):
            half = len(asked) // 2
            return [scores for part in (asked[:half], asked[half:]) for scores in await self._score_batch(pool, part)]

    async def _by_functions(self, pool: Functions, task: Task, completions: Sequence[RewardInput]) -> list[Score]:
        """Score all at once; one by one after a hang or a death. After a hang, later groups are also scored one by one,
        until all episodes of a group finish in time."""
        async with self._room:
            was_slow = self._is_slow
            if not was_slow:
                try:
                    return (await self._call(pool, [(task, completions)]))[0]
                except TimeoutError:
                    self._is_slow = True
                except ProcessEnded:
                    pass
            scores = list(await asyncio.gather(*(self._judge_one(pool, task, c) for c in completions)))
            if was_slow:
                self._is_slow = self._late in scores
            return scores

    async def _judge_one(self, pool: Functions, task: Task, completion: RewardInput) -> Score:
        try:
            return (await self._call(pool, [(task, [completion])]))[0][0]
        except TimeoutError:
            return self._late
        except ProcessEnded as death:
            return Score(None, str(death))

    async def _call(self, pool: Functions, asked: Sequence[ScoreRequest]) -> list[list[Score]]:
        """Run a call in the pool. Cancelling it kills the process."""
        try:
            return await pool.call(asked)
        except PoolBroken as error:
            raise WorkerDied(self.name, "scoring a group", f"its pool of processes broke: {error}") from error


# ------------------------------------------------------------------------------------------- in the killable processes


_rewards: list[RewardSum] = []
"""The functions of this process."""


def _load(specs: Sequence[RewardSpec], memory_mb: int, output: Connection) -> None:
    confine(memory_mb, output)
    _rewards.append(RewardSum(specs))


def _score_all(asked: Sequence[ScoreRequest]) -> list[list[Score]]:
    return _rewards[0].score_groups(asked)


class RewardPool(Pool[RewardWorker]):
    """Implements `Rewards`, and `Composer`."""

    def __init__(self, supply: PoolSpec[RewardWorker]) -> None:
        super().__init__("reward", "scoring a group", supply)

    async def score(self, task: Task, group: Group) -> GroupScores:
        request = (task, group.group_id, group.payload)
        scored, _ = await self._do(await self._least_busy(), request, f"scoring group {group.group_id}")
        assert isinstance(scored, GroupScores)
        return scored

    async def replace_episode(self, replacement: Replacement) -> Group:
        group, member = replacement.group, await self._least_busy()
        parcel = Parcel.of((g.group_id, g.payload) for g in (group, replacement.donor))
        with self._at_work(member):
            places = (replacement.episode, replacement.donor_episode)
            versions, (chunk,) = await member.worker.split(
                RewardWorker.replace_episode, 1, parcel, *places, group.policy
            )
        return replacement.build_group(PayloadRef(chunk, 0), versions)

    async def _least_busy(self) -> PoolMember[RewardWorker]:
        await self._serving()
        return min(self._live(), key=lambda m: (m.num_running, m.index))

    def _send(self, worker: Remote[RewardWorker], requests: list[tuple[Task, int, object]]) -> Chunks:
        parcel = Parcel.of((group_id, payload) for _, group_id, payload in requests)
        return worker.stream(RewardWorker.score_each, [task for task, _, _ in requests], parcel)
