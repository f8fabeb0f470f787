"""A server of rewards or tools is away: groups wait for it, and no task is used up."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.errors import EndpointDown
from rlsys.loop.endpoints import LONGEST_WAIT_S, Endpoints
from rlsys.monitoring.events import EndpointFailed, EndpointRecovered, Events, GroupDropped
from rlsys.testing import EventRecorder, FakeWorld, run_virtual
from rlsys.testing.world_state import Spans, three_tokens
from rlsys.types import Assignment, Episode, Group, Score, Task
from tests.simulate.world import driver_on

URL = "http://judge:8000"


@dataclass
class Server:
    """A server that is away in the seconds from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float
    asked_s: list[float] = field(default_factory=list)
    """Times at which it was asked in vain."""

    def check(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self.begin_s <= now_s < self.end_s:
            self.asked_s.append(now_s)
            raise EndpointDown(URL, "connection refused")

    def judge(self, task: Task, group: Group) -> Iterable[Score]:
        self.check()
        return [Score(float(episode % 2)) for episode in range(len(group.episodes))]

    async def play(self, assignment: Assignment, index: int, spans: Spans, worker: str) -> Episode:
        self.check()
        return await three_tokens(assignment, index, spans, worker)


def calm(folder: Path, max_staleness: int) -> FakeWorld:
    world = FakeWorld()
    run_virtual(driver_on(world, folder / "calm", max_staleness=max_staleness).run(0))
    return world


@settings(deadline=None)
@given(
    begin_s=st.floats(0, 15),
    length_s=st.floats(0.5, 2000),
    max_staleness=st.sampled_from((0, 2)),
    is_tool=st.booleans(),
)
def test_an_outage_uses_up_no_task(
    tmp_path_factory, begin_s: float, length_s: float, max_staleness: int, is_tool: bool
):
    folder, recorder, server = tmp_path_factory.mktemp("run"), EventRecorder(), Server(begin_s, begin_s + length_s)
    world = FakeWorld(play=server.play) if is_tool else FakeWorld(judge=server.judge)
    driver = driver_on(world, folder, max_staleness=max_staleness, recorder=recorder)
    assert run_virtual(driver.run(0)) == 6
    assert world.consumed == calm(folder, max_staleness).consumed
    assert not recorder.of(GroupDropped)
    failed, recovered = recorder.of(EndpointFailed), recorder.of(EndpointRecovered)
    assert len(failed) == len(recovered) == bool(server.asked_s)
    assert {event.endpoint for event in (*failed, *recovered)} <= {URL}
    assert len(server.asked_s) <= driver.queue.bound.capacity + 6 + length_s / LONGEST_WAIT_S
    if failed and length_s > 1:
        assert length_s - begin_s - 20 <= recovered[0].seconds <= length_s + LONGEST_WAIT_S


def test_a_request_that_alone_gets_no_answer_is_dropped(tmp_path: Path):
    def judge(task: Task, group: Group) -> Iterable[Score]:
        if group.group_id == 4:
            raise EndpointDown(URL, "HTTP 500")
        return [Score(float(episode % 2)) for episode in range(len(group.episodes))]

    recorder, world = EventRecorder(), FakeWorld(judge=judge)
    assert run_virtual(driver_on(world, tmp_path, max_staleness=2, recorder=recorder).run(0)) == 6
    assert [(event.group_id, event.reason) for event in recorder.of(GroupDropped)] == [(4, "failed")]
    assert "HTTP 500" in recorder.of(GroupDropped)[0].detail


def test_a_busy_server_that_answers_others_is_waited_for(tmp_path: Path):
    num_refused = iter(range(1000))

    def judge(task: Task, group: Group) -> Iterable[Score]:
        if group.group_id == 4 and next(num_refused) < 8:
            raise EndpointDown(URL, "HTTP 429", is_busy=True)
        return [Score(float(episode % 2)) for episode in range(len(group.episodes))]

    recorder, world = EventRecorder(), FakeWorld(judge=judge)
    assert run_virtual(driver_on(world, tmp_path, max_staleness=2, recorder=recorder).run(0)) == 6
    assert not recorder.of(GroupDropped)
    assert len(recorder.of(EndpointFailed)) == len(recorder.of(EndpointRecovered)) == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_error_crosses_process_borders(is_busy: bool):
    error = pickle.loads(pickle.dumps(EndpointDown(URL, "HTTP 429", is_busy=is_busy)))
    assert (error.endpoint, error.detail, error.is_busy) == (URL, "HTTP 429", is_busy)
    assert str(error) == f"{URL} does not answer: HTTP 429"


def test_others_go_on_while_the_group_that_asked_again_plays(tmp_path: Path):
    """The server is back when the first group asks again, and that group plays for ten minutes."""
    server, done_s = Server(0.0, 20.0), []

    async def play(assignment: Assignment, index: int, spans: Spans, worker: str) -> Episode:
        server.check()
        if not done_s and assignment.group_id == 0:
            await asyncio.sleep(600.0)
        done_s.append(asyncio.get_running_loop().time())
        return await three_tokens(assignment, index, spans, worker)

    recorder = EventRecorder()
    driver = driver_on(FakeWorld(play=play), tmp_path, max_staleness=2, window=9, recorder=recorder)
    assert run_virtual(driver.run(0)) == 6
    assert len(recorder.of(EndpointRecovered)) == 1
    assert recorder.of(EndpointRecovered)[0].seconds < 20.0 + 2 * LONGEST_WAIT_S + 5.0


def test_an_outage_that_nobody_waits_for_any_more_is_forgotten():
    async def scenario() -> list[str]:
        recorder = EventRecorder()
        endpoints = Endpoints(Events([recorder]), 3)

        async def away() -> None:
            raise EndpointDown(URL, "refused")

        for _ in range(2):
            waiting = asyncio.create_task(endpoints.persist(away, "kind"))
            await asyncio.sleep(10.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return [event.endpoint for event in recorder.of(EndpointFailed)]

    assert run_virtual(scenario()) == [URL, URL], "the second outage is told too"
