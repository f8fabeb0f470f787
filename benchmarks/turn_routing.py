"""Turns a second of four replicas on Ray, with turns routed one by one and with groups that stay together.

    python -m benchmarks.measure benchmarks.turn_routing:measured '[["uneven", "even", "single"], 3, 30.0, 5.0]'

Part of `benchmarks.agents`. Replicas are workers of a real pool in processes of their own; their engines are scripted:
8 slots, a token a tick of 5 ms, whatever else the machine does. The pool has 12 groups of 8 sessions in flight,
as long as is measured. Between turns a tool takes 50 ms.

* `uneven`: a session has between 1 and 40 turns, lognormal, median 4, so that most of a group wait for its last.
* `even`: every session has 8 turns.
* `single`: every session is one reply, of 5 to 400 tokens.

`speedup` is turns a second with routing of turns over those without, in the same workers; `away` the share of turns
that another replica than that of the session samples; `busy` the share of all slots in use.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar, Literal, Self, TypeAlias, cast, get_args

from benchmarks.measure import in_turn, ratios, spreads
from rlsys.agents.workflow import Session, Workflow
from rlsys.types import POLICY, Assignment, GroupKey, Sampling, Task
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Request
from workers.ray.cluster import NO_MATHS, connect
from workers.ray.pool import PoolSpec
from workers.ray.remote_proxy import Remote, start
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import PolicyText
from workers.rollout.rollout_pool import RolloutPool
from workers.rollout.rollout_worker import RolloutWorker
from workers.rollout.session_host import GroupSessions
from workers.rollout.turn_router import TurnRouter

NUM_REPLICAS, SLOTS, TICK_S = 4, 8, 0.005
GROUP_SIZE, IN_FLIGHT = 8, 12
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


class Measured(RolloutWorker):
    """A replica that tells its figures and forgets its peers when asked."""

    @classmethod
    def built(cls, name: str, num_tokens: int) -> Self:
        """Build one with a scripted engine."""
        from examples.tiny_policy import build_tokenizer
        from workers.text.tokenizer import TextTokenizer

        engine = ScriptedEngine(reply_of, num_slots=SLOTS, tick_s=TICK_S, max_context=8192, name=name)
        speech = PolicyText(TextTokenizer(build_tokenizer()), Sampling(max_new_tokens=num_tokens), 100, 8192)
        change = WeightChange("between", tolerance=0.0)
        generator = Generator(name, engine, speech, None, change, turns=TurnRouter(SLOTS))
        return cls(name, GroupSessions(Dialogues()), {POLICY: generator})

    def stay_apart(self) -> None:
        """Route no more turns to others."""
        assert self.generator.turns
        self.generator.turns.peers = ()

    def figures(self) -> tuple[int, int, int]:
        """Return the tokens sampled here so far, the turns of sessions here, and those of them sampled by others."""
        assert self.generator.turns
        return self.generator.stats().num_tokens, Dialogues.num_turns, self.generator.turns.num_away


def measured(kinds: Sequence[Sessions], repeats: int, window_s: float, warm_up_s: float) -> dict[str, object]:
    """Measure each kind of sessions, `repeats` times `window_s` seconds, each after `warm_up_s` of the same load."""
    connect(None, NUM_REPLICAS)
    return {kind: of_kind(kind, repeats, window_s, warm_up_s) for kind in kinds}


def of_kind(kind: Sessions, repeats: int, window_s: float, warm_up_s: float) -> dict[str, object]:
    """Measure one kind of sessions in both ways, in the same workers."""
    with asyncio.Runner() as runner:
        pool = RolloutPool(PoolSpec(NUM_REPLICAS, partial(_start, kind), DEADLINE_S, DEADLINE_S, max_attempts=1))
        runner.run(pool.ready())
        routings: tuple[Routing, ...] = get_args(Routing)
        runs = in_turn(
            repeats,
            routings,
            lambda repeat, routing: runner.run(_run(pool, kind, routing, repeat, window_s, warm_up_s)),
        )
        runner.run(pool.close())
    return {
        "speedup": ratios(runs["turn"], runs["group"], "turns_per_s"),
        **{routing: spreads(figures) for routing, figures in runs.items()},
    }


def _start(kind: Sessions, name: str) -> Remote[RolloutWorker]:
    build = partial(Measured.built, name, MAX_TOKENS if kind == "single" else NUM_TOKENS)
    return start(Measured, name, build, NO_MATHS, DEADLINE_S)


async def _run(
    pool: RolloutPool, kind: Sessions, routing: Routing, repeat: int, window_s: float, warm_up_s: float
) -> dict[str, float]:
    workers = [cast("Remote[Measured]", member.worker) for member in pool.members]
    for worker in workers:
        if routing == "turn":
            await worker.call(Measured.meet, [other.worker for other in pool.members if other.worker is not worker])
        else:
            await worker.call(Measured.stay_apart)
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
    (before, began_s), _ = (await _figures(workers), time.perf_counter()), await asyncio.sleep(window_s)
    after, wall_s = await _figures(workers), time.perf_counter() - began_s
    await streams
    tokens, turns, away = (b - a for a, b in zip(before, after, strict=True))
    return {
        "turns_per_s": turns / wall_s,
        "away": away / turns,
        "busy": tokens * TICK_S / wall_s / NUM_REPLICAS / SLOTS,
    }


async def _figures(workers: Sequence[Remote[Measured]]) -> list[int]:
    """Sum the figures of all replicas."""
    told = await asyncio.gather(*(worker.call(Measured.figures) for worker in workers))
    return [sum(figures) for figures in zip(*told, strict=True)]
