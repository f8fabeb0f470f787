"""Thousands of sessions leak no session, no file and no memory."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import aiohttp
import orjson
import pytest

from rlsys.gateway.gateway_server import Gateway, shared_gateway
from rlsys.testing import ScriptedPolicy
from rlsys.types import POLICY
from rlsys.workflows.openai_agent import OpenAIAgent
from tests.gateways import TASK, HeldPolicy, session_of
from tests.replicas import until

PAGE = os.sysconf("SC_PAGE_SIZE")


WORKFLOW = OpenAIAgent(agent="tests.openai_agents:by_hand")


def request_of(text: str) -> bytes:
    return orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]})


async def play(number: int) -> None:
    """An episode of two turns over HTTP, each session on a connection of its own."""
    session = WORKFLOW.session(TASK, {POLICY: ScriptedPolicy(lambda prompt: "ok")}, number, 0, {})
    (trajectory,) = (await WORKFLOW.play(session)).trajectories
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)


async def leave(gateway: Gateway) -> None:
    """One reply, and a client that leaves while the next is sampled."""
    policy = HeldPolicy()
    async with gateway.serve(session_of(policy)) as endpoint, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        url = f"{endpoint.base_url}/chat/completions"
        policy.gate.set()
        async with http.post(url, headers=headers, data=request_of("a")) as answer:
            assert answer.status == 200
        policy.gate.clear()
        leaving = asyncio.create_task(http.post(url, headers=headers, data=request_of("b")).__aenter__())
        await until(lambda: policy.num_waiting == 1)
        leaving.cancel()
        await until(lambda: policy.num_cancelled == 1)


def num_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def usage() -> tuple[int, int, int]:
    """Open files, objects, and bytes of memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_files(), len(gc.get_objects()), pages * PAGE


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [600, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_sessions_leave_nothing_behind(num_sessions: int):
    async def many(gateway: Gateway, num: int, num_leaving: int) -> None:
        for first in range(0, num, 100):
            await asyncio.gather(*map(play, range(first, first + 100)))
        for _ in range(num_leaving // 20):
            await asyncio.gather(*(leave(gateway) for _ in range(20)))

    async def main() -> None:
        async with shared_gateway() as gateway:
            await many(gateway, 1000, 100)
            files, objects, memory = usage()
            num_tasks = len(asyncio.all_tasks())
            await many(gateway, num_sessions, 300)
            assert not gateway.endpoints
            await until(lambda: num_files() <= files)  # connections that are being closed
            more_files, more_objects, more_memory = usage()
            await until(lambda: len(asyncio.all_tasks()) == num_tasks)
        assert more_files <= files
        assert more_objects - objects < 1000  # less than an object a session
        assert more_memory - memory < 8 << 20  # some kilobytes a session

    asyncio.run(asyncio.wait_for(main(), 200))
