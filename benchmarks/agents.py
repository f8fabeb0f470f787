"""Waiting times of agents: tools, other agents, and the gateway.

    python -m benchmarks.agents [--quick | --short]

* `streamed`: episodes of 8 turns whose tool takes 100 ms with a long tail, 256 at a time on one replica. As one ends,
  the next begins. `by_batch` does the same work, but the next 256 begin once all have ended. In `lock_step`, all
  sessions also wait for the slowest tool in every turn. `speedup_batch` and `speedup_lock_step` are sessions per second
  of `streamed` over those of either. `environment_wait_share` is the part of a session's life in which a tool runs,
  `engine_busy_share` the share of the engine's slots in use over the wall time, `engine_load` its number of requests,
  waiting ones included. The engine is scripted: 64 slots, a token a tick of 1 ms.
* `subagents`: the wall time of 8 subagents in parallel against the longest of them, and against their sum.
* `routing`: turns a second on four replicas, see `benchmarks.turn_routing`.
* `prefix`: a dialogue of 8 turns on the engine `local` with SmolLM2. `computed_over_distinct` is the number of tokens
  computed over that of the dialogue; `speedup` the time that it takes if nothing is kept from turn to turn, over that
  with what is kept; `bits_differ` the replies whose tokens or logprobs differ between both.
* `gateway_ms`: the extra time of a reply through the gateway over one inside the session, at 64 clients that send
  requests without a pause, each turn 50 to 150 ms. Clients are another process with a raw HTTP client that keeps its
  connections. `openai_client_ms` is the same with the `openai` client, at 8 clients (more would saturate a core):
  mostly the cost of that client. Each client has a session, and requests turn after turn of one conversation, then of
  the next. The text of a turn contains its duration, so that the extra time of every reply is known.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, quantiles
from typing import Any, Literal, TypeAlias, cast, get_args

from benchmarks.measure import (
    Size,
    engine_spec,
    in_fresh_process,
    in_turn,
    parser_of,
    print_result,
    ratios,
    smollm,
    sorter,
    spread,
    spreads,
)
from benchmarks.turn_routing import Sessions
from rlsys.agents.agent import Policy, Tell
from rlsys.agents.tools import Tool, Toolbox
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.gateway.gateway_server import shared_gateway
from rlsys.routing.request_router import RequestRouter
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY, Assignment, GroupKey, Message, Sampling, Task, Turn
from tests.scripted_engine import ScriptedEngine
from workers.rollout.policy_text import PolicyText
from workers.rollout.replica import EngineReplica
from workers.rollout.replica_weights import WeightChange
from workers.rollout.session_worker import GroupSessions, PolicyRoad, SessionWorker
from workers.text.tokenizer import TextTokenizer

NUM_SESSIONS, GROUP_SIZE, NUM_TURNS = 256, 8, 8
MEDIAN_S, SPREAD, LONGEST_S = 0.1, 0.8, 3.0
"""Latency of a tool call, lognormal: one in ten takes 0.28 s or more, one in a hundred 0.64 s."""
SLOTS, TICK_S = 64, 0.001
Pace: TypeAlias = Literal["streamed", "by_batch", "lock_step"]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
NUM_SUBAGENTS = 8
NUM_CONTEXT, NUM_REPLY, NUM_IDS = 24, 16, 15
"""Tokens of each turn of a dialogue, and the number of different ones."""
SHORTEST_TURN_S, LONGEST_TURN_S = 0.05, 0.15
Client: TypeAlias = Literal["raw", "openai"]
Ask: TypeAlias = Callable[[Sequence[Message]], Awaitable[str]]
"""Function from a conversation to the reply."""


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

    def count(self, num: int) -> None:
        """Count so many more requests of the engine from now on."""
        at_s = time.perf_counter()
        self.slot_s += (at_s - self._since_s) * min(self._num_requests, SLOTS)
        self.request_s += (at_s - self._since_s) * self._num_requests
        self._since_s = at_s
        self._num_requests += num


@dataclass(frozen=True, kw_only=True)
class Lookups(Workflow):
    """Workflow of turns and tools in turn, in lock-step with all sessions of the barrier."""

    meter: Meter = field(default_factory=Meter)
    barrier: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(1))

    async def run(self, session: Session) -> None:
        """Call the tool `NUM_TURNS` times."""
        began_s = time.perf_counter()
        chance = random.Random(f"{session.task.id}/{session.episode_index}")
        tools = Toolbox(Tool("look", "Look around.", {"type": "object"}, partial(self._look, chance)))
        agent, prompt = session.agent(POLICY, system="Look."), session.task.prompt
        for _ in range(NUM_TURNS):
            self.meter.count(1)
            reply = await agent.act(prompt, tools)
            self.meter.count(-1)
            await self.barrier.wait()
            prompt = await agent.answer(reply.calls, tools)
            await self.barrier.wait()
        self.meter.session_s += time.perf_counter() - began_s

    async def _look(self, chance: random.Random) -> str:
        """Return after a latency, lognormal up to `LONGEST_S`."""
        seconds = min(LONGEST_S, chance.lognormvariate(math.log(MEDIAN_S), SPREAD))
        await asyncio.sleep(seconds)
        self.meter.tool_s += seconds
        return "nothing"


def main() -> None:
    """Measure all and print the result line."""
    size = parser_of(__doc__, quick="one repeat; under two minutes").parse_args().size
    repeats = 3 if size == "full" else 1
    batches, sessions, clients, conversations = (1, 16, 4, 2) if size == "short" else (3, NUM_SESSIONS, 64, 5)
    paces: tuple[Pace, ...] = get_args(Pace)
    runs = in_turn(repeats, paces, lambda _, pace: asyncio.run(rollouts(batches, sessions, pace=pace)))
    subagents = [asyncio.run(parallel_subagents()) for _ in range(repeats)]
    gateway = [asyncio.run(gateway_overhead("raw", clients, conversations)) for _ in range(repeats)]
    openai = [asyncio.run(gateway_overhead("openai", clients // 8 or 1, conversations)) for _ in range(repeats)]
    prefix = [asyncio.run(kept_prefixes(size, seed)) for seed in range(repeats)]
    kinds, *seconds = (["even"], 2.0, 0.5) if size == "short" else (get_args(Sessions), 30.0, 5.0)
    routing = in_fresh_process("benchmarks.turn_routing:measured", kinds, repeats, *seconds)
    print_result(
        {
            "routing": routing,
            "prefix": spreads(prefix),
            "speedup_batch": ratios(runs["streamed"], runs["by_batch"], "sessions_per_s"),
            "speedup_lock_step": ratios(runs["streamed"], runs["lock_step"], "sessions_per_s"),
            **{pace: spreads(figures) for pace, figures in runs.items()},
            "subagents": spreads(subagents),
            "gateway_ms": spread([run["overhead_ms"] for run in gateway]),
            "gateway_p95_ms": spread([run["overhead_p95_ms"] for run in gateway]),
            "session_ms": spread([run["direct_ms"] for run in gateway]),
            "openai_client_ms": spread([run["overhead_ms"] for run in openai]),
        }
    )


async def rollouts(num_batches: int, num_sessions: int, *, pace: Pace) -> dict[str, float]:
    """Measure `num_batches` times `num_sessions` episodes on one replica."""
    meter = Meter()
    worker = player(Lookups(meter=meter, barrier=asyncio.Barrier(num_sessions if pace == "lock_step" else 1)))
    groups = num_sessions // GROUP_SIZE
    room = asyncio.Semaphore(groups)

    async def group(group_id: int) -> None:
        async with room:
            await worker.run(
                Assignment(GroupKey(group_id, 1), Task(id=str(group_id), prompt="Look."), GROUP_SIZE, 0, seed=group_id)
            )

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


def player(workflow: Workflow) -> SessionWorker:
    """Build a session worker beside an engine that always calls the tool."""
    codec = tokenizer()
    said = codec.reply(CALL)
    engine = ScriptedEngine(lambda _: said, num_slots=SLOTS, tick_s=TICK_S, max_context=4096)
    change = WeightChange("between", tolerance=0.0)
    replica = EngineReplica("rollout-0", engine, None, change, num_slots=SLOTS)
    sampling = Sampling(max_new_tokens=len(said))
    text = PolicyText(
        codec=codec, sampling=sampling, max_prompt_tokens=4000, max_context_tokens=4000 + len(said), worker="rollout-0"
    )
    road = PolicyRoad(text, RequestRouter([replica]))
    return SessionWorker("rollout-0", GroupSessions(workflow), {POLICY: road}, group_s=math.inf)


def tokenizer() -> TextTokenizer:
    """Build a tokenizer with one token per character and messages in ChatML."""
    from examples.tiny_policy import EOS, build_tokenizer

    made = build_tokenizer()
    made.add_tokens(list("{}_"))
    made.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}"
        + EOS
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return TextTokenizer(made)


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


async def kept_prefixes(size: Size, seed: int) -> dict[str, float]:
    """Measure a dialogue, with what the engine keeps from turn to turn and without."""
    import torch

    from rlsys.routing.requests import Completion, Request
    from workers.engines.engine_choice import start_engine
    from workers.engines.local.local_engine import LocalEngine

    path = sorter("short") if size == "short" else smollm()
    spec = engine_spec("local", str(path / "model"), "float32", slots=8, max_context=1024)
    engine = await start_engine(spec, "local", stop_token_ids=frozenset(), device=torch.device("cpu"), worker="local")
    assert isinstance(engine, LocalEngine)
    chance = random.Random(seed)
    contexts = [[chance.randrange(NUM_IDS) for _ in range(NUM_CONTEXT)] for _ in range(NUM_TURNS)]

    async def talk(*, keeps: bool) -> tuple[float, list[Completion]]:
        began_s, prompt, replies, spans = time.perf_counter(), (), [], ()
        for turn, context in enumerate(contexts):
            prompt += tuple(context)
            sampling = Sampling(max_new_tokens=NUM_REPLY)
            replies.append(await engine.generate(Request(f"{keeps}{turn}", prompt, sampling, turn, sampled=spans)))
            spans += ((len(prompt), len(prompt) + NUM_REPLY),)
            prompt += replies[-1].output_ids
            if not keeps:
                engine.forget_prefixes()
        return time.perf_counter() - began_s, replies

    whole_s, whole = await talk(keeps=False)
    computed = engine.num_computed
    kept_s, kept = await talk(keeps=True)
    computed = engine.num_computed - computed
    await engine.close()
    return {
        "computed_over_distinct": computed / NUM_TURNS / (NUM_CONTEXT + NUM_REPLY),
        "speedup": whole_s / kept_s,
        "bits_differ": sum(a != b for a, b in zip(whole, kept, strict=True)),
    }


# ------------------------------------------------------------------------------------------------------------ gateway


@dataclass
class SlowPolicy(ScriptedPolicy):
    """Policy that sleeps and replies with its duration."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def sample(
        self,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        tell: Tell | None = None,
    ) -> Turn:
        began_s = time.perf_counter()
        await asyncio.sleep(self.chance.uniform(SHORTEST_TURN_S, LONGEST_TURN_S))
        return await self.recite(prompt_ids, f"{time.perf_counter() - began_s:.7f}")


async def gateway_overhead(client: Client, num_clients: int, num_conversations: int) -> dict[str, float]:
    """Measure the extra milliseconds of a reply through the gateway over one inside the session."""
    policy = SlowPolicy()
    sessions = [Session(Task(id=str(n), prompt=""), {POLICY: policy}, seed=n) for n in range(num_clients)]
    in_session = await asyncio.gather(*(_in_session(session, num_conversations) for session in sessions))
    direct = [ms for all_ms in in_session for ms in all_ms]
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(shared_gateway())
        endpoints = [await stack.enter_async_context(gateway.serve(session)) for session in sessions]
        where = [(endpoint.base_url, endpoint.api_key) for endpoint in endpoints]
        function = "benchmarks.agents:run_clients"
        through = await asyncio.to_thread(in_fresh_process, function, client, num_conversations, where)
    return {
        "overhead_ms": fmean(through) - fmean(direct),
        "overhead_p95_ms": quantiles(through, n=20)[-1] - quantiles(direct, n=20)[-1],
        "direct_ms": fmean(direct),
    }


async def _in_session(session: Session, num_conversations: int) -> list[float]:
    agents = [session.agent(POLICY) for _ in range(num_conversations)]

    async def ask(messages: Sequence[Message]) -> str:
        number = int(str(messages[-1]["content"]).partition(".")[0])
        return await agents[number].chat((messages[-1],))

    return await converse(ask, num_conversations)


async def converse(ask: Ask, num_conversations: int) -> list[float]:
    """Measure the milliseconds of every turn without those of the policy; the first conversation, which connects, does
    not count."""
    all_ms = []
    for number in range(num_conversations):
        said: list[Message] = []
        for turn in range(NUM_TURNS):
            said.append(Message(role="user", content=f"{number}.{turn}"))
            began_s = time.perf_counter()
            reply = await ask(said)
            all_ms.append(1000 * (time.perf_counter() - began_s - float(reply)))
            said.append(Message(role="assistant", content=reply))
    return all_ms[NUM_TURNS:]


def run_clients(client: Client, num_conversations: int, where: Sequence[tuple[str, str]]) -> list[float]:
    """Run one client at each address with its key, in this process; return the milliseconds of all turns."""

    talk = {"raw": talk_raw, "openai": talk_openai}[client]

    async def main() -> list[list[float]]:
        return await asyncio.gather(*(talk(num_conversations, *each) for each in where))

    return [ms for all_ms in asyncio.run(main()) for ms in all_ms]


async def talk_raw(num_conversations: int, base_url: str, api_key: str) -> list[float]:
    """Send HTTP by hand over one persistent connection."""
    host, path = base_url.removeprefix("http://").split("/", 1)
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"

    async def ask(messages: Sequence[Message]) -> str:
        body = json.dumps({"model": POLICY, "messages": messages}).encode()
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert headers.startswith("http/1.1 200"), headers
        length = int(headers.split("content-length:")[1].split("\r\n")[0])
        return json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"]

    try:
        return await converse(ask, num_conversations)
    finally:
        writer.close()


async def talk_openai(num_conversations: int, base_url: str, api_key: str) -> list[float]:
    """Send requests by the `openai` client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages: Sequence[Message]) -> str:
            sent: list[Any] = [*messages]
            reply = await client.chat.completions.create(model=POLICY, messages=sent)
            return reply.choices[0].message.content or ""

        return await converse(ask, num_conversations)


if __name__ == "__main__":
    main()
