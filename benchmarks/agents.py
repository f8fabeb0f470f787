"""Waiting times of agents: tools, other agents, and the gateway.

    python -m benchmarks.agents [--quick | --short]

* `streamed`: episodes of 8 turns whose tool takes 100 ms with a long tail, 256 at a time on one replica. As one ends,
  the next begins. `by_batch` does the same work, but the next 256 begin once all have ended. In `lock_step`, all
  sessions also wait for the slowest tool in every turn. `speedup_batch` and `speedup_lock_step` are sessions per second
  of `streamed` over those of either. `environment_wait_share` is the part of a session's life in which a tool runs,
  `engine_busy_share` the share of the engine's slots in use over the wall time, `engine_load` its number of requests,
  waiting ones included. The engine is scripted: 64 slots, a token a tick of 1 ms.
* `subagents`: the wall time of 8 subagents in parallel against the longest of them, and against their sum.
* `gateway_ms`: the extra time of a reply through the gateway over one inside the session, at 64 clients that send
  requests without a pause, each turn 50 to 150 ms. Clients are another process with a raw HTTP client that keeps its
  connections. `openai_client_ms` is the same with the `openai` client, at 8 clients (more would saturate a core):
  mostly the cost of that client.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from string import printable
from typing import Literal, TypeAlias, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.gateway_load import overhead_of_gateway
from benchmarks.measure import parser_of, print_result, progress, spread, spreads
from rlsys.agents.agent import Policy
from rlsys.agents.tools import Tool, Toolbox
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY, Assignment, Sampling, Task
from workers.engines.engine import Request
from workers.engines.scripted import ScriptedEngine
from workers.rollout.generator import Generator, WeightChange
from workers.rollout.group_route import PolicyText
from workers.rollout.rollout_worker import RolloutWorker
from workers.text.tokenizer import TextTokenizer

NUM_SESSIONS, GROUP_SIZE, NUM_TURNS = 256, 8, 8
MEDIAN_S, SPREAD, LONGEST_S = 0.1, 0.8, 3.0
"""Latency of a tool call, lognormal: one in ten takes 0.28 s or more, one in a hundred 0.64 s."""
SLOTS, TICK_S = 64, 0.001
Pace: TypeAlias = Literal["streamed", "by_batch", "lock_step"]
END = "<eos>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
NUM_SUBAGENTS = 8


@dataclass
class Meter:
    """Use of time by many sessions."""

    session_s: float = 0.0
    tool_s: float = 0.0
    slot_s: float = 0.0
    """Slot-seconds of the engine in use."""
    request_s: float = 0.0
    """Request-seconds."""
    _num_requests: int = 0
    _since_s: float = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one more request of the engine in this context."""
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, num: int) -> None:
        at_s = time.perf_counter()
        self.slot_s += (at_s - self._since_s) * min(self._num_requests, SLOTS)
        self.request_s += (at_s - self._since_s) * self._num_requests
        self._since_s = at_s
        self._num_requests += num


@dataclass(frozen=True, kw_only=True)
class Lookups(Workflow):
    """Workflow of turns and tools in turn; with a barrier in lock-step with all other sessions."""

    meter: Meter = field(default_factory=Meter)
    barrier: asyncio.Barrier | None = None

    async def run(self, session: Session) -> None:
        """Call the tool `NUM_TURNS` times."""
        began_s = time.perf_counter()
        chance = random.Random(f"{session.task.id}/{session.episode_index}")
        tools = Toolbox(Tool("look", "Look around.", {"type": "object"}, partial(self._look, chance)))
        agent, prompt = session.agent(POLICY, system="Look."), session.task.prompt
        for _ in range(NUM_TURNS):
            with self.meter.request():
                reply = await agent.act(prompt, tools)
            await self._together()
            prompt = await agent.answer(reply.calls, tools)
            await self._together()
        self.meter.session_s += time.perf_counter() - began_s

    async def _look(self, chance: random.Random) -> str:
        seconds = latency_s(chance)
        await asyncio.sleep(seconds)
        self.meter.tool_s += seconds
        return "nothing"

    async def _together(self) -> None:
        if self.barrier:
            await self.barrier.wait()


def latency_s(chance: random.Random) -> float:
    """Draw the seconds of one tool call."""
    return min(LONGEST_S, chance.lognormvariate(math.log(MEDIAN_S), SPREAD))


def main() -> None:
    """Measure all and print the result line."""
    size = parser_of(__doc__, quick="one repeat; under two minutes").parse_args().size
    repeats = 3 if size == "full" else 1
    batches, sessions, clients, conversations = (1, 16, 4, 2) if size == "short" else (3, NUM_SESSIONS, 64, 5)
    runs: dict[Pace, list[dict[str, float]]] = {"streamed": [], "by_batch": [], "lock_step": []}
    for repeat in range(repeats):
        for pace, figures in runs.items():
            figures.append(asyncio.run(rollouts(batches, sessions, pace=pace)))
            progress(f"{repeat + 1}, {pace}: {figures[-1]}")
    subagents = [asyncio.run(parallel_subagents()) for _ in range(repeats)]
    gateway = [overhead_of_gateway("raw", clients, conversations) for _ in range(repeats)]
    openai = [overhead_of_gateway("openai", clients // 8 or 1, conversations) for _ in range(repeats)]
    print_result(
        {
            "speedup_batch": spread(ratios(runs["streamed"], runs["by_batch"])),
            "speedup_lock_step": spread(ratios(runs["streamed"], runs["lock_step"])),
            **{pace: spreads(figures) for pace, figures in runs.items()},
            "subagents": spreads(subagents),
            "gateway_ms": spread([run["overhead_ms"] for run in gateway]),
            "gateway_p95_ms": spread([run["overhead_p95_ms"] for run in gateway]),
            "session_ms": spread([run["direct_ms"] for run in gateway]),
            "openai_client_ms": spread([run["overhead_ms"] for run in openai]),
        }
    )


def ratios(of: Sequence[Mapping[str, float]], to: Sequence[Mapping[str, float]]) -> list[float]:
    """Ratios of sessions per second, repeat by repeat."""
    return [a["sessions_per_s"] / b["sessions_per_s"] for a, b in zip(of, to, strict=True)]


async def rollouts(num_batches: int, num_sessions: int, *, pace: Pace) -> dict[str, float]:
    """Measure `num_batches` times `num_sessions` episodes on one replica."""
    meter = Meter()
    worker = replica(Lookups(meter=meter, barrier=asyncio.Barrier(num_sessions) if pace == "lock_step" else None))
    groups = num_sessions // GROUP_SIZE
    room = asyncio.Semaphore(groups)

    async def group(group_id: int) -> None:
        async with room:
            await worker.run(Assignment(group_id, Task(id=str(group_id), prompt="Look."), GROUP_SIZE, 0, seed=group_id))

    began_s = time.perf_counter()
    at_once = num_batches * groups if pace == "streamed" else groups
    for first in range(0, num_batches * groups, at_once):
        await asyncio.gather(*map(group, range(first, first + at_once)))
    wall_s = time.perf_counter() - began_s
    await worker.close()
    return {
        "sessions_per_s": num_batches * num_sessions / wall_s,
        "environment_wait_share": meter.tool_s / meter.session_s,
        "engine_busy_share": meter.slot_s / wall_s / SLOTS,
        "engine_load": meter.request_s / wall_s,
    }


def replica(workflow: Workflow) -> RolloutWorker:
    """Build a rollout worker whose engine always calls the tool."""
    codec = TextTokenizer(tokenizer())
    said = codec.reply(CALL)

    def reply(request: Request) -> Sequence[int]:
        return said

    engine = ScriptedEngine(reply, num_slots=SLOTS, tick_s=TICK_S, max_context=4096)
    speech = PolicyText(codec, Sampling(max_new_tokens=len(said)), max_prompt_tokens=4000)
    return RolloutWorker("rollout-0", workflow, {POLICY: Generator("rollout-0", engine, speech, None, NO_CHANGE)})


NO_CHANGE = WeightChange("between", tolerance=0.0)


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character and messages in ChatML."""
    vocabulary = {symbol: index for index, symbol in enumerate([END, *printable])}
    core = Tokenizer(models.WordLevel(vocabulary))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, clean_up_tokenization_spaces=False)
    made.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
        + END
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return made


async def parallel_subagents() -> dict[str, float]:
    """Measure the wall time of subagents that take from 100 to 800 ms each."""
    session = Session(Task(id="t", prompt=""), {POLICY: cast("Policy", ScriptedPolicy())}, seed=0)
    lead = session.agent("lead")

    async def subagent(number: int) -> float:
        began_s = time.perf_counter()
        agent: Agent = session.agent("subagent", parent=lead)
        await agent.chat("Look.")
        await asyncio.sleep(0.1 * (number + 1))
        await agent.chat("And?")
        return time.perf_counter() - began_s

    began_s = time.perf_counter()
    took_s = [each for each in await session.gather(*map(subagent, range(NUM_SUBAGENTS))) if isinstance(each, float)]
    wall_s = time.perf_counter() - began_s
    return {"wall_over_longest": wall_s / max(took_s), "wall_over_sum": wall_s / sum(took_s)}


if __name__ == "__main__":
    main()
