"""The rollout worker: runs workflows, with one generator per policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from math import inf
from types import SimpleNamespace
from typing import Literal, Self

from rlsys.agents.workflow import Workflow
from rlsys.batch.samples import meta_of, versions_of
from rlsys.config.chat_section import ChatSection
from rlsys.config.schema import EarlyEndsSection
from rlsys.errors import ConfigError, RlsysError, WorkerDied, WorkerError
from rlsys.types import (
    Acknowledged,
    Assignment,
    Busy,
    EngineStats,
    Episode,
    Group,
    ReplicaLoad,
    RolloutReport,
    Sampling,
    Score,
    Turn,
)
from rlsys.util.deadlines import remote
from workers.engines.engine import EngineChoice, EngineSpec, ServerSpec
from workers.ray.call_stream import answer_in_chunks
from workers.ray.cluster import Resources
from workers.ray.remote_proxy import Remote, place_of, this_worker
from workers.rollout.early_ends import EpisodeJudge, GroupEnds, PlayedGroup
from workers.rollout.generator import REPLACEABLE, Generator, WeightChange
from workers.rollout.group_route import GroupRoute, PolicyText, Ticket
from workers.rollout.partial_responses import Partials, PartialStream
from workers.rollout.session_host import GroupSessions, SessionHost, SessionHosts
from workers.rollout.turn_router import TurnRouter
from workers.text.tokenizer import AS_MADE, TextTokenizer
from workers.transport.route import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """The engine of a replica for one policy, and the source of its weights."""

    engine: EngineSpec
    change: WeightChange
    pulls: Literal["newest", "pinned", "never"]
    """Weights that the replica pulls from its relay: the newest, exactly the pinned version (evaluation), or none. With
    `never`, the weights of `model_path` stay loaded (a frozen policy, `rlsys eval`)."""
    servers: tuple[ServerSpec, ...] = ()
    """Servers of the engine `vllm_server`, by the replica's place."""

    def at(self, place: int) -> Self:
        """Specification for the replica at a place. Raises `ConfigError` if there is no server for it."""
        if not self.servers:
            return self
        if place >= len(self.servers):
            raise ConfigError(
                f"rollout.engine.urls: {len(self.servers)} servers are too few: each replica needs its own"
            )
        return replace(self, engine=replace(self.engine, server=self.servers[place]), servers=())


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Specification of a rollout replica."""

    generators: Mapping[str, GeneratorSpec]
    """By policy name."""
    bindings: Mapping[str, str] = field(default_factory=dict)
    """Agent name -> policy name, see `Session`."""
    sampling: Sampling
    max_prompt_tokens: int
    workflow: Workflow
    resources: Resources
    chat: ChatSection = AS_MADE
    """With the text of its template."""
    ends: EarlyEndsSection | None = None
    judge: Callable[[str], EpisodeJudge] | None = None
    """Makes the judge of ended episodes, with the replica's name; None: only workflows give rewards."""
    scores: bool = False
    """True if the replica scores its groups."""

    def speech_of(self, policy: str) -> PolicyText:
        """Load what turns prompts of a policy into tokens."""
        own = self.generators[policy].engine
        codec = TextTokenizer.load(own.model_path, self.chat)
        return PolicyText(codec, self.sampling, self.max_prompt_tokens, own.max_context)

    def sessions(self, name: str, judge: EpisodeJudge | None = None) -> GroupSessions:
        """Sessions of training in the worker `name`, which may have a judge already."""
        ends, made = self.ends, None
        if ends is not None:
            judge = judge or (self.judge(name) if self.judge else None)
            made = GroupEnds(ends.after, ends.keep, judge)
        return GroupSessions(self.workflow, self.bindings, made)


async def load_generator(
    name: str, spec: RolloutSpec, policy: str, route: Route | None, partials: Remote[Partials] | None
) -> Generator:
    """Load the generator of a policy, in the process of the replica `name`."""
    from workers.engines.engine_choice import choose, start_engine
    from workers.train.adapter_files import base_hash
    from workers.transport.puller import WeightPuller

    own, device = spec.generators[policy], spec.resources.claim()
    choice, text = choose(own.engine, device), spec.speech_of(policy)
    codec = text.codec
    engine = await start_engine(
        own.engine, choice.engine, stop_token_ids=codec.stop_ids, decode=codec.decode, device=device, worker=name
    )
    puller = None
    if own.pulls != "never":
        assert route is not None, "a policy that pulls has relays"
        puller = WeightPuller(route, is_pinned=own.pulls == "pinned")
    recorder = None if partials is None else PartialStream(partials.proxy)
    base = base_hash(own.engine.model_path) if own.engine.lora else None
    return Generator(name, engine, text, puller, own.change, recorder, choice, base, TurnRouter(own.engine.slots))


class RolloutWorker:
    """One rollout replica."""

    def __init__(
        self,
        name: str,
        sessions: GroupSessions,
        generators: Mapping[str, Generator],
        hosts: SessionHosts | None = None,
        me: RolloutWorker | None = None,
        judge: EpisodeJudge | None = None,
    ) -> None:
        """Create the replica `name`. `generators` are by policy name. `sessions` are played here without `hosts`, which
        reach this replica as `me`. With a `judge`, it scores its groups."""
        self._judge = judge
        self.name, self._sessions, self._generators = name, sessions, generators
        self._hosts, self._me = hosts or SessionHosts(()), me or self
        self._routes: dict[Ticket, Mapping[str, GroupRoute]] = {}
        """Routes of all groups here, by policy name."""
        self._turns: dict[tuple[Ticket, str, int], asyncio.Future[Turn]] = {}
        """Turns that are sampled for hosts, by group, policy and seed."""
        self.places = SimpleNamespace(**{str(i): generator for i, generator in enumerate(generators.values())})
        """The generators as attributes, for `Remote.at`: names of policies may have dots."""
        self._began_s: dict[Ticket, float | None] = {}
        """Start of every group here, on this machine's monotonic clock; None while it waits for weights."""
        self._num_groups = 0

    @classmethod
    async def of(
        cls,
        name: str,
        spec: RolloutSpec,
        routes: Mapping[str, Route],
        partials: Mapping[str, Remote[Partials]],
        hosts: Sequence[Remote[SessionHost]] = (),
    ) -> Self:
        """Load the engine of each policy, in this process. `routes` and `partials` are by name of the policies that
        pull."""
        generators = {
            policy: await load_generator(name, spec, policy, routes.get(policy), partials.get(policy))
            for policy in spec.generators
        }
        is_training = any(own.pulls == "newest" for own in spec.generators.values())
        judge = spec.judge(name) if spec.scores and spec.judge else None
        if judge is not None:
            await judge.start()
        if not is_training:
            sessions = GroupSessions(spec.workflow.in_evaluation(), spec.bindings)
            return cls(name, sessions, generators, judge=judge)
        known = SessionHosts([host.proxy for host in hosts], place_of(name))
        me = this_worker(name, cls).proxy if hosts else None
        return cls(name, spec.sessions(name, judge), generators, known, me, judge)

    @property
    def generator(self) -> Generator:
        """The only generator, in a run of one policy."""
        (only,) = self._generators.values()
        return only

    @remote("meeting its peers")
    def meet(self, peers: Sequence[Remote[RolloutWorker]]) -> None:
        """Route single turns to these replicas too, see `TurnRouter`. They replace those of the call before."""
        for place, generator in vars(self.places).items():
            if generator.turns:
                generator.turns.peers = tuple(peer.at(Generator, f"places.{place}").proxy for peer in peers)

    def run_each(self, requests: Sequence[tuple[Assignment, bool]]) -> AsyncIterator[object]:
        """Roll out assignments, each with the flag `is_again` of `run`; see `answer_in_chunks`."""
        return answer_in_chunks(requests, lambda request: self.run(request[0], is_again=request[1]))

    async def run(
        self, assignment: Assignment, *, is_again: bool = False
    ) -> tuple[tuple[Group, ...], tuple[Episode, ...]]:
        """Roll out one group; returns metadata and payload separately.

        `is_again`: the group was assigned before, and continues from its tokens in the partial response pool.
        """
        arrived_s = time.monotonic()
        self._num_groups += 1
        ticket = Ticket(self.name, assignment.group_id, self._num_groups)
        self._began_s[ticket] = None
        try:
            await self._hold(assignment)
            policies = {name: generator.begin(ticket) for name, generator in self._generators.items()}
            self._routes[ticket] = policies
            self._began_s[ticket] = start_s = time.monotonic()
            played = await self._attempt(assignment, policies, is_again=is_again)
            scores = await self._judge.score(assignment.task, played.episodes) if self._judge else None
        finally:
            del self._began_s[ticket]
            self._routes.pop(ticket, None)
        trained = list(assignment.versions or self._generators)  # all trained policies, or the only one
        views = [await self._view(name, policies[name], assignment, played, scores) for name in trained]
        busy = Busy(self.name, start_s, time.monotonic())
        pulls = tuple(pull for generator in self._generators.values() for pull in generator.take_pulls())
        report = RolloutReport(busy, self.stats(), start_s - arrived_s, pulls)
        return (replace(views[0], report=report), *views[1:]), played.episodes

    @remote("telling its engines")
    def choices(self) -> dict[str, EngineChoice]:
        """By policy: the engine, and the reason for it."""
        return {name: generator.choice for name, generator in self._generators.items() if generator.choice}

    @remote("telling its versions")
    def held(self) -> dict[str, Acknowledged]:
        """By policy: the acknowledgement of the loaded weights, for policies that have pulled any."""
        told = {name: generator.acknowledged for name, generator in self._generators.items()}
        return {name: held for name, held in told.items() if held is not None}

    @remote("telling its load")
    def load(self, policy: str) -> ReplicaLoad:
        """The load of one policy."""
        return self._generators[policy].load()

    @remote("telling its statistics")
    def stats(self) -> EngineStats:
        """Statistics of all engines together."""
        stats = [generator.stats() for generator in self._generators.values()]
        return EngineStats(
            num_running=sum(s.num_running for s in stats),
            num_waiting=sum(s.num_waiting for s in stats),
            kv_used=max(s.kv_used for s in stats),
            num_tokens=sum(s.num_tokens for s in stats),
            num_cached_tokens=sum(s.num_cached_tokens for s in stats),
            step_age_s=max(s.step_age_s for s in stats),
        )

    @remote("forgetting {owner}")
    async def forget(self, owner: str) -> None:
        """Evict the groups of replica `owner`, which has died."""
        await asyncio.gather(*(generator.forget(owner) for generator in self._generators.values()))

    @remote("rolling out group {group_id}")
    def age_s(self, group_id: int) -> float | None:
        """Seconds since a group started here: 0 while it waits for weights, None if it is not here."""
        began_s = [since_s for ticket, since_s in self._began_s.items() if ticket.group_id == group_id]
        ages_s = [time.monotonic() - since_s for since_s in began_s if since_s is not None]
        return min(ages_s, default=0.0 if began_s else None)

    async def close(self) -> None:
        for generator in self._generators.values():
            await generator.close()
        await self._sessions.close()
        if self._judge is not None:
            await self._judge.close()

    async def _hold(self, assignment: Assignment) -> None:
        """Return once all generators have weights no older than the assignment requires, at the same moment.

        Waits for each generator in turn, see `Generator.ensure_version`, and blocks none meanwhile. If the weights of
        another generator begin to change during a wait, it waits for that generator again. Ends because every change is
        for a published version, and running groups never wait for a group that waits here.
        """
        needed = [(each, assignment.version_of(name)) for name, each in self._generators.items()]
        while True:
            for generator, version in needed:
                await generator.ensure_version(version)
            if all(generator.is_ready(version) for generator, version in needed):
                return

    async def _attempt(
        self, assignment: Assignment, policies: Mapping[str, GroupRoute], *, is_again: bool
    ) -> PlayedGroup:
        is_issued_again = False
        try:
            if is_again:
                for name, policy in policies.items():
                    await self._generators[name].recall(policy, assignment.version_of(name))
            return await self._play(assignment, policies)
        except REPLACEABLE:
            is_issued_again = True
            raise
        finally:
            async with AsyncExitStack() as ends:  # a failing call does not skip the others
                for name, policy in policies.items():
                    end = self._generators[name].end
                    ends.push_async_callback(end, policy, is_again=is_again, keep_partials=is_issued_again)

    async def _play(self, assignment: Assignment, policies: Mapping[str, GroupRoute]) -> PlayedGroup:
        """Play the sessions of a group in a host, or here. Raises the first failure of a worker, also of one that a
        workflow handled: its episodes must not be trained."""

        def failed() -> WorkerError | None:
            return next((policy.failure for policy in policies.values() if policy.failure), None)

        host = self._hosts.choose()
        try:
            if host is None:
                played = await self._sessions.play(self.name, assignment, policies)
            else:
                ticket = next(iter(policies.values())).ticket
                played = await self._hosts.play(host, self._me, ticket, assignment)
        except RlsysError as error:
            raise failed() or error from None
        if failure := failed():
            raise failure
        return played

    @remote("sampling for group {ticket.group_id}", patience=inf)
    async def sample_turn(
        self,
        ticket: Ticket,
        policy: str,
        prompt_ids: tuple[int, ...],
        seed: int,
        max_new_tokens: int | None,
        stop: tuple[str, ...],
    ) -> Turn:
        """Sample a turn for a group here whose sessions are in a host. Raises the errors of `GroupRoute.sample`, and
        `WorkerDied` after `cancel_turn`."""
        work = self._route(ticket, policy).sample(prompt_ids, seed, max_new_tokens, stop)
        turn = self._turns[ticket, policy, seed] = asyncio.ensure_future(work)
        try:
            await asyncio.wait([turn])
        finally:
            turn.cancel()
            del self._turns[ticket, policy, seed]
        if turn.cancelled():
            raise WorkerDied(self.name, f"sampling for group {ticket.group_id}", "its session was cancelled")
        return turn.result()

    @remote("ending a turn of group {ticket.group_id}")
    async def cancel_turn(self, ticket: Ticket, policy: str, seed: int) -> None:
        """Sample no further for the request with this seed, which is unique in its group."""
        if (turn := self._turns.get((ticket, policy, seed))) is not None:
            turn.cancel()

    @remote("scoring for group {ticket.group_id}", patience=inf)
    async def recite_turn(self, ticket: Ticket, policy: str, prompt_ids: tuple[int, ...], reply: str) -> Turn:
        """Score a recorded reply for such a group."""
        return await self._route(ticket, policy).recite(prompt_ids, reply)

    def _route(self, ticket: Ticket, policy: str) -> GroupRoute:
        if ticket not in self._routes:
            raise WorkerDied(self.name, f"sampling for group {ticket.group_id}", "the group has ended here")
        return self._routes[ticket][policy]

    async def _view(
        self,
        name: str,
        policy: GroupRoute,
        assignment: Assignment,
        played: PlayedGroup,
        scores: tuple[Score, ...] | None,
    ) -> Group:
        """View of the group for one policy, without the payload."""
        episodes = played.episodes
        versions = versions_of(episodes, name)
        return Group(
            key=assignment.key,
            task_id=assignment.task.id,
            source=assignment.task.source,
            permit_version=assignment.version_of(name),
            replica=self.name,
            episodes=meta_of(episodes),
            versions=versions,
            weights=await self._generators[name].vouched(policy, versions),
            payload=None,
            policy=name,
            settled_reward=played.settled_reward,
            num_ended_early=assignment.size - len(episodes),
            scores=scores,
        )
