"""Turns a second of four replicas on Ray, with turns routed one by one and with groups that stay together.

    python -m benchmarks.measure benchmarks.turn_routing:measured '[["uneven", "even", "single"], 3, 30.0, 5.0]'

Part of `benchmarks.agents`. Replicas and session workers are those of a real pool, each in a process of its own; the
engines are scripted: 8 slots, a token a tick of 5 ms, whatever else the machine does. The pool has 6 groups of 8
sessions in flight, as long as is measured. Between turns a tool takes 50 ms.

* `uneven`: a session has between 1 and 40 turns, lognormal, median 4, so that most of a group wait for its last.
* `even`: every session has 8 turns.
* `single`: every session is one reply, of 5 to 400 tokens.

`speedup` is turns a second with routing of turns over those of groups whose holder samples all their turns, in the same
workers; `away` the share of tokens that another replica than the holder of the group samples; `busy` the share of all
slots in use.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar, Literal, Self, TypeAlias, cast, get_args

from benchmarks.measure import in_turn, ratios, spreads
from rlsys.agents.workflow import Session, Workflow
from rlsys.routing.request_router import Claim, KnownReplica, RequestRouter
from rlsys.routing.requests import Request
from rlsys.types import POLICY, Assignment, GroupKey, Sampling, Task
from tests.replicas import Shelf, replica_of, weights_of
from tests.scripted_engine import ScriptedEngine
from workers.ray.cluster import NO_MATHS, connect
from workers.ray.fault_tolerant_pool import PoolSpec
from workers.ray.worker_process import Remote, start
from workers.rollout.policy_text import PolicyText
from workers.rollout.replica_worker import ReplicaWorker
from workers.rollout.rollout_pool import RolloutPool, SessionPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_worker import GroupSessions, PolicyRoad, SessionWorker

NUM_REPLICAS, SLOTS, TICK_S = 4, 8, 0.005
GROUP_SIZE, IN_FLIGHT = 8, 6
TOOL_S = 0.05
NUM_TOKENS, MAX_TOKENS = 40, 400
MEDIAN_TURNS, MAX_TURNS, EVEN_TURNS = 4, 40, 8
Sessions: TypeAlias = Literal["uneven", "even", "single"]
Routing: TypeAlias = Literal["turn", "group"]
DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Dialogues(Workflow):
    """Workflow of as many turns as the task and the session have, with a pause after each."""

    num_turns: ClassVar[int] = 0
    """Turns so far in this process."""

    async def run(self, session: Session) -> None:
        """Talk until the session has its turns."""
        agent = session.agent(POLICY)
        kind, _, number = session.task.id.partition("/")
        num_turns = turns_of(kind, int(number), session.episode_index)
        for turn in range(num_turns):
            await agent.chat(session.task.prompt if turn == 0 else "12>")
            Dialogues.num_turns += 1
            if turn < num_turns - 1:
                await asyncio.sleep(TOOL_S)


def turns_of(kind: str, number: int, episode: int) -> int:
    """Return the number of turns of an episode."""
    if kind != "uneven":
        return EVEN_TURNS if kind == "even" else 1
    drawn = random.Random(f"{number}/{episode}").lognormvariate(math.log(MEDIAN_TURNS), 1.0)
    return max(1, min(MAX_TURNS, round(drawn)))


def reply_of(request: Request) -> list[int]:
    """Return the tokens of a reply. A single one is of any length, which its seed tells."""
    most = request.sampling.max_new_tokens
    return [5] * (NUM_TOKENS if most == NUM_TOKENS else 5 + request.seed % (most - 5))


def replica(name: str) -> RolloutWorker:
    """Build a replica with a scripted engine, whose weights never become newer."""
    shapes = {tensor: tuple(value.shape) for tensor, value in weights_of(0).items()}
    engine = ScriptedEngine(
        reply_of, num_slots=SLOTS, tick_s=TICK_S, max_context=8192, name=name, shapes=shapes, version=-1
    )
    return RolloutWorker(name, ReplicaWorker(name, {POLICY: replica_of(Shelf(), engine, name=name, num_slots=SLOTS)}))


class Router(RequestRouter):
    """Router that keeps a group at the replica that holds its weights, on demand."""

    routing: Routing = "turn"
    num_tokens = num_away = 0
    """Tokens of groups that have ended, and those of them that another replica than the holder sampled."""

    def _serves(self, place: KnownReplica, claim: Claim) -> bool:
        is_holder = claim.hold is not None and claim.hold.replica == place.name
        return super()._serves(place, claim) and (is_holder or self.routing == "turn")

    def release(self, claim: Claim) -> None:
        assert claim.hold is not None
        self.num_tokens += claim.tokens_at.total()
        self.num_away += claim.tokens_at.total() - claim.tokens_at[claim.hold.replica]
        super().release(claim)


class Measured(SessionWorker):
    """Session worker that tells its figures, and that routes turns or groups."""

    @classmethod
    def built(cls, name: str, num_tokens: int) -> Self:
        """Build one without replicas."""
        from examples.tiny_policy import build_tokenizer
        from workers.text.tokenizer import TextTokenizer

        text = PolicyText(
            codec=TextTokenizer(build_tokenizer()), sampling=Sampling(max_new_tokens=num_tokens),
            max_prompt_tokens=8192, max_context_tokens=8192, worker=name,
        )  # fmt: skip
        return cls(name, GroupSessions(Dialogues()), {POLICY: PolicyRoad(text, Router())}, group_s=math.inf)

    async def route(self, routing: Routing) -> None:
        """Route so from now."""
        self.router.routing = routing

    async def figures(self) -> Counter[str]:
        """Return the turns so far, and the tokens of groups that have ended."""
        router = self.router
        return Counter(turns=Dialogues.num_turns, tokens=router.num_tokens, away=router.num_away)

    @property
    def router(self) -> Router:
        """The only router."""
        return cast("Router", self._roads[POLICY].router)


def measured(kinds: Sequence[Sessions], repeats: int, window_s: float, warm_up_s: float) -> dict[str, object]:
    """Measure each kind of sessions, `repeats` times `window_s` seconds, each after `warm_up_s` of the same load."""
    connect(None, NUM_REPLICAS)
    return {kind: of_kind(kind, repeats, window_s, warm_up_s) for kind in kinds}


def of_kind(kind: Sessions, repeats: int, window_s: float, warm_up_s: float) -> dict[str, object]:
    """Measure one kind of sessions in both ways, in the same workers."""
    num_tokens = MAX_TOKENS if kind == "single" else NUM_TOKENS

    def start_replica(name: str) -> Remote[RolloutWorker]:
        return start(RolloutWorker, name, partial(replica, name), NO_MATHS, DEADLINE_S)

    def start_sessions(name: str) -> Remote[SessionWorker]:
        return start(Measured, name, partial(Measured.built, name, num_tokens), NO_MATHS, DEADLINE_S)

    with asyncio.Runner() as runner:
        sessions = SessionPool(
            "session", PoolSpec(NUM_REPLICAS, start_sessions, DEADLINE_S, DEADLINE_S, max_attempts=1), DEADLINE_S
        )
        replicas = PoolSpec(NUM_REPLICAS, start_replica, DEADLINE_S, DEADLINE_S, max_attempts=1)
        pool = RolloutPool(replicas, sessions=sessions)
        runner.run(pool.ready())
        workers = [cast("Remote[Measured]", member.worker) for member in sessions.members]
        routings: tuple[Routing, ...] = get_args(Routing)
        runs = in_turn(
            repeats,
            routings,
            lambda repeat, routing: runner.run(_run(pool, workers, kind, routing, repeat, window_s, warm_up_s)),
        )
        runner.run(pool.close())
    return {
        "speedup": ratios(runs["turn"], runs["group"], "turns_per_s"),
        **{routing: spreads(figures) for routing, figures in runs.items()},
    }


async def _run(
    pool: RolloutPool,
    workers: Sequence[Remote[Measured]],
    kind: Sessions,
    routing: Routing,
    repeat: int,
    window_s: float,
    warm_up_s: float,
) -> dict[str, float]:
    for worker in workers:
        await worker.call(Measured.route, routing)
    numbers = count(1000 * repeat)

    async def stream() -> None:
        while True:
            group_id = next(numbers)
            task = Task(id=f"{kind}/{group_id}", prompt="321>")
            await pool.run(Assignment(GroupKey(group_id, 1), task, GROUP_SIZE, 0, seed=group_id))
            if time.perf_counter() >= end_s:
                return

    end_s = time.perf_counter() + warm_up_s + window_s
    streams = asyncio.gather(*(stream() for _ in range(IN_FLIGHT)))
    await asyncio.sleep(warm_up_s)
    (before, began_s), _ = (await _figures(pool, workers), time.perf_counter()), await asyncio.sleep(window_s)
    after, wall_s = await _figures(pool, workers), time.perf_counter() - began_s
    await streams
    done = after - before
    return {
        "turns_per_s": done["turns"] / wall_s,
        "away": done["away"] / max(1, done["tokens"]),
        "busy": done["sampled"] * TICK_S / wall_s / NUM_REPLICAS / SLOTS,
    }


async def _figures(pool: RolloutPool, workers: Sequence[Remote[Measured]]) -> Counter[str]:
    """Sum the figures of all session workers, and the tokens that engines sampled."""
    figures = await asyncio.gather(*(worker.call(Measured.figures) for worker in workers))
    sampled = sum(load.stats.num_tokens for load in await pool.loads())
    return sum(figures, Counter(sampled=sampled))
