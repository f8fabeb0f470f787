"""Agents on a real replica: limits of a turn, tools in a template, and errors for the author of a buggy workflow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

import pytest

from examples.tiny_policy import build_tokenizer
from rlsys.agents.workflow import Session, Workflow
from rlsys.types import Sampling, VersionSpan
from tests.models import tiny_sorter
from tests.replicas import DIGIT, Shelf, assignment, played, replica_of, scripted
from workers.engines.engine import Completion, EngineSpec, Request
from workers.engines.local import LocalEngine
from workers.rollout.generator import Generator
from workers.rollout.group_route import GroupRoute, PolicyText, Ticket
from workers.rollout.partial_responses import Partial
from workers.text.tokenizer import TextTokenizer

NUM_TOKENS = 30


class Short(Workflow):
    """Turns of different limits."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for most in (4, None, 999):
            await agent.chat("12>", max_new_tokens=most)


class Talk(Workflow):
    """A dialogue of four turns."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        for said in ("12>", "345>", "6>", "78>"):
            await agent.chat(said)


class Wide(Workflow):
    """A lead, and forks of it that speak at once."""

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        await lead.chat(session.task.prompt, max_new_tokens=5)
        forks = [lead.fork("helper") for _ in range(3)]
        await session.gather(*(fork.chat(f"{n}>", max_new_tokens=6) for n, fork in enumerate(forks)))


class Buggy(Workflow):
    """Has a bug after its first turn."""

    async def run(self, session: Session) -> None:
        said = await session.agent("policy").chat(session.task.prompt, max_new_tokens=3)
        int(said + "!")


def test_a_dialogue_computes_each_of_its_tokens_once():
    engine = LocalEngine(
        tiny_sorter(), EngineSpec(model_path="", slots=4, max_context=128), stop_token_ids=frozenset({1}), name="a"
    )
    worker = replica_of(None, engine, workflow=Talk(), num_tokens=NUM_TOKENS - 20)
    _, (episode,) = played([worker], lambda: worker.run(assignment(size=1)))
    last = episode.trajectories[0].turns[-1]
    assert engine.num_computed == len(last.prompt_ids) + len(last.output_ids) - 1


def test_the_token_limit_of_a_turn_is_capped_and_recorded():
    worker = replica_of(Shelf(), scripted("a"), workflow=Short(), num_tokens=NUM_TOKENS - 20)
    _, episodes = played([worker], lambda: worker.run(assignment()))
    for episode in episodes:
        turns = episode.trajectories[0].turns
        assert [len(turn.output_ids) for turn in turns] == [4, 10, 10]
        assert [turn.sampling for turn in turns] == [Sampling(max_new_tokens=n) for n in (4, 10, 10)]


def test_forks_share_the_parents_tokens_and_have_distinct_seeds():
    seeds: list[int] = []

    def reply(request: Request) -> Sequence[int]:
        seeds.append(request.seed)
        return [DIGIT] * 5

    worker = replica_of(Shelf(), scripted("a", reply), workflow=Wide(), num_tokens=NUM_TOKENS)
    _, (first, second) = played([worker], lambda: worker.run(assignment()))
    for episode in (first, second):
        lead, *forks = episode.trajectories
        seen = (*lead.turns[0].prompt_ids, *lead.turns[0].output_ids)
        assert [fork.turns[0].prompt_ids[: len(seen)] for fork in forks] == [seen] * 3
    assert len(set(seeds)) == 8


def test_a_bug_is_told_with_what_was_said():
    worker = replica_of(Shelf(), scripted("a"), workflow=Buggy(), num_tokens=NUM_TOKENS)
    _, (episode,) = played([worker], lambda: worker.run(assignment(size=1)))
    lines = episode.trajectories[0].outcome.reason.splitlines()
    assert "ValueError: invalid literal for int()" in lines[0]
    assert lines[1] == f'  File "{__file__}", line {Buggy.run.__code__.co_firstlineno + 2}, in run'
    assert lines[-2:] == ["[policy] user: 12>", f"[policy] assistant: {lines[-1].rpartition(' ')[2]}"]


class Place:
    """A replica that samples what is left of a request."""

    name = "rollout-0"

    def __init__(self) -> None:
        self.begun: list[int] = []

    async def serve(self, ticket: Ticket, request: Request) -> Completion:
        self.begun.append(request.num_begun)
        num = request.sampling.max_new_tokens
        return completion(num, "length")


def completion(num: int, finish: Literal["stop", "length"]) -> Completion:
    return Completion((DIGIT,) * num, (-1.0,) * num, (VersionSpan(0, num),), finish)


@pytest.mark.parametrize(
    ("num_kept", "finish", "most", "num", "begun"),
    [
        (5, None, 8, 8, [5]),
        (5, "stop", 8, 5, []),
        (5, "length", 5, 5, []),
        (5, None, 5, 5, []),
        (5, "length", 8, 8, [0]),
        (5, "stop", 3, 3, [0]),
        (5, None, 3, 3, [0]),
    ],
    ids=[
        "goes on",
        "was over",
        "was cut at this",
        "is as long as it may be",
        "was cut earlier",
        "is too long",
        "is too long already",
    ],
)
def test_a_partial_completion_is_resumed_only_within_its_budget(
    num_kept: int, finish: Literal["stop", "length"] | None, most: int, num: int, begun: list[int]
):
    place = Place()
    speech = PolicyText(
        TextTokenizer(build_tokenizer()), Sampling(max_new_tokens=20), max_prompt_tokens=60, max_context_tokens=80
    )
    replica = cast("Generator", place)
    policy = GroupRoute(Ticket("rollout-0", 3, 1), speech, place=replica, home=replica, held=None)
    kept = replace(completion(num_kept, "stop"), finish=finish)
    policy.recalled = {7: Partial((9,), kept, ())}
    turn = asyncio.run(policy.sample((9,), seed=7, max_new_tokens=most))
    assert (len(turn.output_ids), place.begun) == (num, begun)
    assert turn.sampling.max_new_tokens == most
    assert turn.finish == ("stop" if begun == [] and finish == "stop" else "length")
