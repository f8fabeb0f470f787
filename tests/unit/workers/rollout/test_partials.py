"""Partial responses outlive their replica: a reissued group begins with them, or from scratch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.agents.workflow import Session, Workflow
from rlsys.errors import TaskTooLong, WorkerDied
from rlsys.types import Acknowledged, Episode, VersionSpan
from tests.replicas import Shelf, assignment, hash_of, own_tokens, played, replica_of, scripted, until
from tests.scripted_engine import ScriptedEngine
from workers.engines.engine import Completion
from workers.rollout.group_route import Ticket
from workers.rollout.partial_responses import ENDED_KEPT, Note, Partial, Partials, PartialStream, usable

NUM_TOKENS = 30
When = Literal["between", "inflight", "beside"]


def completion(ids: Sequence[int], version: int = 0) -> Completion:
    return Completion(tuple(ids), (0.0,) * len(ids), (VersionSpan(version, len(ids)),) if ids else (), None)


def note(ids: Sequence[int], num_before: int, *, attempt: int = 1, seed: int = 7, version: int = 0) -> Note:
    more = Partial(() if num_before else (1, 2), completion(ids, version), (Acknowledged("a", version, "h"),))
    return Note(Ticket("a", 1, attempt), seed, num_before, more)


# --------------------------------------------------------------------------------------------------------- the pool


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6))
def test_notes_that_follow_each_other_make_the_whole(pieces: list[list[int]]):
    async def main() -> Mapping[int, Partial]:
        partials, told = Partials(), 0
        for piece in pieces:
            assert await partials.record([note(piece, told)]) == []
            told += len(piece)
        return await partials.recall(1)

    whole = [token for piece in pieces for token in piece]
    partial = asyncio.run(main())[7]
    assert partial.prompt_ids == (1, 2)
    assert partial.done == completion(whole)
    assert partial.weights == (Acknowledged("a", 0, "h"),)


def test_a_gap_in_partials_is_reported_and_restarts_replace_them():
    async def main() -> None:
        partials = Partials()
        assert await partials.record([note([5], 3), note([6], 0, seed=8)]) == [(1, 7)]
        assert await partials.record([note([5, 5], 0)]) == []
        assert await partials.record([note([9], 1)]) == [(1, 7)], "it knows two tokens, not one"
        assert await partials.record([note([4], 0, version=2)]) == []
        assert (await partials.recall(1))[7].done == completion([4], version=2)
        assert await partials.version(1) == 2

    asyncio.run(main())


def test_an_ended_group_is_forgotten_and_its_late_partials_ignored():
    async def main() -> None:
        partials = Partials()
        await partials.record([note([5], 0)])
        await partials.forget(Ticket("a", 1, 1))
        assert await partials.record([note([6], 0)]) == []
        assert await partials.recall(1) == {}
        assert await partials.version(1) is None
        for group_id in range(2, 2 + ENDED_KEPT):
            await partials.forget(Ticket("a", group_id, 1))
        assert len(partials._ended) == ENDED_KEPT

    asyncio.run(main())


def test_a_group_reissued_after_its_end_is_recorded_again():
    async def main() -> None:
        partials = Partials()
        await partials.record([note([5], 0)])
        await partials.forget(Ticket("a", 1, 1))
        await partials.record([note([6, 6], 0, attempt=2)])
        assert await partials.record([note([5], 1)]) == [], "a late note of the attempt before"
        assert (await partials.recall(1))[7].done == completion([6, 6])

    asyncio.run(main())


def test_only_partials_within_the_version_bounds_are_usable():
    partials = {v: Partial((1,), completion([5], v), (Acknowledged("a", v, f"h{v}"),)) for v in range(4)}
    own = {2: Acknowledged("b", 2, "h2")}
    assert list(usable(partials, own, 1)) == [1, 2, 3]
    assert list(usable(partials, own, 2, 2)) == [2]
    assert list(usable(partials, {2: Acknowledged("b", 2, "other")}, 1)) == [1, 3]


# ------------------------------------------------------------------------------------------------------ the replicas


class Turns(Workflow):
    """Two turns, the second about what the tool said."""

    def __init__(self, said: str = "34>") -> None:
        self.said = said

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        await agent.chat(session.task.prompt)
        await agent.chat(self.said)


class Pair:
    """A replica that dies, and another that the group is issued to again; both know the same pool."""

    def __init__(
        self, when: When = "between", store: Partials | None = None, said: tuple[str, str] | None = None
    ) -> None:
        self.store = store or Partials()
        self.shelves = [Shelf(), Shelf()]
        self.engines = [scripted("a"), scripted("b")]
        workflows = [Turns(text) for text in said] if said else [None, None]
        self.workers = [
            replica_of(
                self.shelves[i],
                self.engines[i],
                name="ab"[i],
                when=when,
                workflow=workflows[i],
                num_tokens=NUM_TOKENS,
                recorder=PartialStream(self.store, period_s=0),
            )
            for i in range(2)
        ]

    async def dies_at(self, num_tokens: int) -> int:
        """Let the first replica die when so many tokens of a group are noted; returns how many are."""
        group = asyncio.create_task(self.workers[0].run(assignment()))
        noted = await self.noted(num_tokens)
        await self.workers[0].close()
        with pytest.raises(WorkerDied):
            await group
        return noted

    async def noted(self, num_tokens: int) -> int:
        """Tokens that are noted, once these are at least so many."""
        while (noted := await self.num_noted()) < num_tokens:  # noqa: ASYNC110  (the recorder tells nobody)
            await asyncio.sleep(0)
        return noted

    async def num_noted(self) -> int:
        return sum(len(p.done.output_ids) for p in (await self.store.recall(3)).values())


def undisturbed(workflow: Workflow | None = None) -> tuple[Episode, ...]:
    worker = replica_of(Shelf(), scripted("b"), name="b", workflow=workflow, num_tokens=NUM_TOKENS)
    return played([worker], lambda: worker.run(assignment()))[1]


@pytest.mark.parametrize(("num_tokens", "said"), [(20, None), (2 * NUM_TOKENS + 20, ("34>", "34>"))])
def test_a_reissued_group_resumes_from_partials_to_equal_results(num_tokens, said):
    pair = Pair(said=said)

    async def scenario() -> None:
        noted = await pair.dies_at(num_tokens)
        done, payload = await pair.workers[1].run(assignment(), is_again=True)
        total = done[0].num_trained
        assert noted >= num_tokens
        assert pair.engines[1].stats().num_tokens == total - noted
        assert done[0].versions == (VersionSpan(0, total),)
        assert done[0].weights == (Acknowledged("b", 0, hash_of(0)),)
        assert payload == undisturbed_payload
        assert await pair.store.recall(3) == {}, "it has ended"

    undisturbed_payload = undisturbed(Turns() if said else None)
    played(pair.workers, scenario)


@pytest.mark.parametrize("when", ["between", "beside"])
def test_on_another_version_it_begins_from_scratch(when: When):
    pair = Pair(when)

    async def scenario() -> None:
        await pair.dies_at(20)
        pair.shelves[1].put(1)
        done, _ = await pair.workers[1].run(assignment(), is_again=True)
        assert done[0].versions == (VersionSpan(1, 2 * NUM_TOKENS),)
        assert pair.engines[1].stats().num_tokens == 2 * NUM_TOKENS

    played(pair.workers, scenario)


def test_inflight_resumption_acknowledges_both_versions():
    pair = Pair("inflight")

    async def scenario() -> None:
        noted = await pair.dies_at(20)
        pair.shelves[1].put(1)
        done, _ = await pair.workers[1].run(assignment(), is_again=True)
        assert done[0].versions == (VersionSpan(0, noted), VersionSpan(1, 2 * NUM_TOKENS - noted))
        assert done[0].weights == (Acknowledged("a", 0, hash_of(0)), Acknowledged("b", 1, hash_of(1)))

    played(pair.workers, scenario)


def test_inflight_tokens_older_than_the_permit_are_sampled_again():
    pair = Pair("inflight")

    async def scenario() -> None:
        await pair.dies_at(20)
        pair.shelves[1].put(1)
        done, _ = await pair.workers[1].run(assignment(1), is_again=True)
        assert done[0].versions == (VersionSpan(1, 2 * NUM_TOKENS),)

    played(pair.workers, scenario)


def test_partials_are_forgotten_even_if_the_next_attempt_ends_unused():
    pair = Pair()
    third = replica_of(pair.shelves[1], scripted("c"), name="c", recorder=PartialStream(pair.store, period_s=60.0))

    async def scenario() -> None:
        await pair.dies_at(20)
        pair.shelves[1].put(1)
        await third.run(assignment(1), is_again=True)
        assert pair.store._kept == {}

    played([*pair.workers, third], scenario)


def test_partials_of_weights_with_another_hash_are_not_used():
    pair = Pair("inflight")

    async def scenario() -> None:
        await pair.dies_at(20)
        for kept in pair.store._kept[3].values():
            kept._parts = [replace(part, weights=(Acknowledged("a", 0, "others"),)) for part in kept._parts]
        await pair.workers[1].run(assignment(), is_again=True)
        assert pair.engines[1].stats().num_tokens == 2 * NUM_TOKENS

    played(pair.workers, scenario)


def test_a_turn_with_a_changed_prompt_starts_over():
    pair = Pair(said=("34>", "56>"))

    async def scenario() -> None:
        await pair.dies_at(2 * NUM_TOKENS + 20)
        done, payload = await pair.workers[1].run(assignment(), is_again=True)
        assert pair.engines[1].stats().num_tokens == done[0].num_trained - 2 * NUM_TOKENS, "the first turns are kept"
        assert payload == undisturbed_payload

    undisturbed_payload = undisturbed(Turns("56>"))
    played(pair.workers, scenario)


class Dead(Partials):
    """A pool whose process is gone for a while."""

    is_dead = False

    async def record(self, notes: Sequence[Note]) -> list[tuple[int, int]]:
        self._check()
        return await super().record(notes)

    async def recall(self, group_id: int) -> Mapping[int, Partial]:
        self._check()
        return await super().recall(group_id)

    async def forget(self, ticket: Ticket) -> None:
        self._check()
        await super().forget(ticket)

    def _check(self) -> None:
        if self.is_dead:
            raise WorkerDied("partials", "keeping", "the process is gone")


def test_without_the_pool_it_begins_from_scratch_and_nothing_fails():
    store = Dead()
    pair = Pair(store=store)

    async def scenario() -> None:
        await pair.dies_at(20)
        store.is_dead = True
        done, payload = await pair.workers[1].run(assignment(), is_again=True)
        assert done[0].versions == (VersionSpan(0, 2 * NUM_TOKENS),)
        assert pair.engines[1].stats().num_tokens == 2 * NUM_TOKENS
        assert payload == undisturbed_payload

    undisturbed_payload = undisturbed()
    played(pair.workers, scenario)


def test_a_pool_that_came_back_empty_is_told_all_again():
    store = Dead()
    pair = Pair(store=store)

    async def scenario() -> None:
        group = asyncio.create_task(pair.workers[0].run(assignment()))
        await pair.noted(10)
        store._kept.clear()
        await pair.noted(30)
        await pair.engines[0].pause()
        said = [job.completion(None).output_ids for job in pair.engines[0]._jobs]
        recalled = (await store.recall(3)).values()
        assert all(any(ids[: len(p.done.output_ids)] == p.done.output_ids for ids in said) for p in recalled)
        await pair.engines[0].resume()
        await group

    played(pair.workers, scenario)


def test_partials_of_a_guest_outlive_its_owner():
    pair = Pair()
    third = scripted("c")
    c = replica_of(Shelf(), third, name="c", num_tokens=NUM_TOKENS, recorder=PartialStream(pair.store, period_s=0))
    a, b = pair.workers

    async def scenario() -> None:
        await b.run(assignment(group_id=9))
        group = asyncio.create_task(a.run(assignment()))
        await until(lambda: pair.engines[0].stats().num_tokens >= 10)
        await a.generator.give_away("a", b.generator)
        await pair.noted(30)
        group.cancel()
        noted = await pair.num_noted()
        _, payload = await c.run(assignment(), is_again=True)
        assert third.stats().num_tokens <= 2 * NUM_TOKENS - noted
        assert payload == undisturbed_payload

    undisturbed_payload = undisturbed()
    played([*pair.workers, c], scenario)


class Counting(ScriptedEngine):
    """Counts how often it is asked for progress."""

    asked = 0

    async def progress(self, known: Mapping[str, int]) -> Mapping[str, Completion]:
        self.asked += 1
        return await super().progress(known)


def test_groups_shorter_than_the_period_are_never_recorded():
    engine = Counting(own_tokens, shapes={"w": (2,)}, version=-1, name="a")

    class Untouched(Partials):
        async def record(self, notes: Sequence[Note]) -> list[tuple[int, int]]:
            raise AssertionError("nothing to note")

        async def forget(self, ticket: Ticket) -> None:
            raise AssertionError("nothing to forget")

    worker = replica_of(Shelf(), engine, name="a", recorder=PartialStream(Untouched(), period_s=60.0))

    async def scenario() -> None:
        await worker.run(assignment())
        assert worker.generator._recorder is not None
        await worker.generator._recorder.note(engine, worker.generator._stays.values(), worker.generator._acknowledged)
        assert engine.asked == 0

    played([worker], scenario)


def test_a_group_that_is_dropped_is_forgotten():
    class TooLong(Workflow):
        async def run(self, session: Session) -> None:
            await session.agent("policy").chat("1>")
            raise TaskTooLong("rollout-0", "encoding a prompt", "80 tokens")

    store = Partials()
    worker = replica_of(Shelf(), scripted("a"), workflow=TooLong(), recorder=PartialStream(store, period_s=0))

    async def scenario() -> None:
        with pytest.raises(TaskTooLong):
            await worker.run(assignment())
        assert store._kept == {}

    played([worker], scenario)


def test_tokens_of_a_version_not_acknowledged_yet_are_not_noted():
    pair = Pair()
    a = pair.workers[0]
    engine = pair.engines[0]

    async def scenario() -> None:
        group = asyncio.create_task(a.run(assignment()))
        await until(lambda: engine.stats().num_tokens >= 10)
        assert a.generator._recorder is not None
        other = Partials()
        await PartialStream(other, period_s=0).note(engine, a.generator._stays.values(), {})
        assert await other.recall(3) == {}
        await group

    played(pair.workers, scenario)
