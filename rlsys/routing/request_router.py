"""Router of the requests of one session worker: which replica samples each, and what follows its abort or death.

    claim      a group's weights, at the replica with the fewest groups
    generate   a request, at the replica where it costs least:
               of those with the weights wanted, the one that sampled its longest prefix, unless another has so much
               less to do that computing the prefix again is worth it, measured speeds included (prefix-aware weighted
               load balancing, as in AgentMath, arXiv:2512.20745);
               aborted or lost: go on at another one, from the last token;
               a replica in this process has it as long as it has a free slot

A router sees its own requests, and the loads that come with answers: no process sees every request. Two session workers
that choose alike are the price, which the loads keep small.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar

from rlsys.errors import DeadlineExceeded, WorkerDied, WorkerError
from rlsys.routing.known_prefixes import KnownPrefixes
from rlsys.routing.requests import LOSSES, Chunk, Completion, Hold, Replica, Request, Scored, WeightsWanted
from rlsys.types import Acknowledged, EngineStats, Pull, ReplicaLoad

BASE_WEIGHT = 1
"""Weight of a request without a prefix: AgentMath's w_base. The paper gives no value for this and the next constant."""
PREFIX_TOKENS = 1024
"""Prefix tokens that add 1 to the weight: AgentMath's L_base."""
TOLERANCE = 1
"""Weight by which the replica with the prefix may have more to do than another one, besides what the prefix saves."""
OVERLOAD = 1.5
"""Cost at the replica with the prefix, in multiples of the least one, from which a request goes elsewhere."""
QUEUE_FACTOR = 2
"""Requests of one router at a replica, in multiples of the slots of its engine. More wait here, where they can still go
elsewhere."""
REST_S = 10.0
"""Seconds for which a replica that did not answer in time is not used."""
SLOWEST = 0.1
"""Least speed of a replica in multiples of the fastest one's: a slower one is given work all the same."""


W = TypeVar("W", bound="ReplicaWork")


def request_weight(num_tokens: int) -> int:
    """Return floor(L / L_base) + w_base for a request with a prefix of L = `num_tokens`."""
    return num_tokens // PREFIX_TOKENS + BASE_WEIGHT


@dataclass(eq=False)
class ReplicaWork:
    """Work of one replica, as one router knows it."""

    num_running: int = 0
    """Requests of this router there."""
    weight: int = 0
    """Their total weight."""
    others: int = 0
    """Weight of the requests of other routers, as of its last answer."""
    reported: ReplicaLoad | None = None
    """Its load, as of its last answer."""
    is_stuck: bool = False
    """True if it makes no progress at the moment."""

    @property
    def has_room(self) -> bool:
        """True if another request would not wait there for long."""
        num_slots = self.reported.num_slots if self.reported else 0
        return not num_slots or self.num_running < QUEUE_FACTOR * num_slots

    @property
    def tokens_per_s(self) -> float:
        """Measured speed; 0 if unknown."""
        return self.reported.tokens_per_s if self.reported else 0.0

    @property
    def has_slot(self) -> bool:
        """True if another request would start there at once."""
        num_slots = self.reported.num_slots if self.reported else 0
        return not num_slots or self.num_running + self.others < num_slots

    def add(self, weight: int) -> None:
        """Count a request that is sent there."""
        self.num_running, self.weight = self.num_running + 1, self.weight + weight

    def remove(self, weight: int) -> None:
        """Count a request there no longer."""
        self.num_running, self.weight = self.num_running - 1, self.weight - weight


@dataclass(eq=False, kw_only=True)
class KnownReplica(ReplicaWork):
    """A replica as one router knows it."""

    replica: Replica
    num_claims: int = 0
    """Groups of this router that hold its weights, or wait for them."""
    held: Acknowledged | None = None
    """Its weights, as of its last answer."""
    is_fixed: bool = False
    """True if its weights never change."""
    is_free: bool = False
    """True if its weights change under running requests, so that there is nothing to hold."""
    pulling: asyncio.Future[Hold | None] | None = None
    """A call of `hold` under way, on which several requests wait."""

    @property
    def name(self) -> str:
        return self.replica.name

    def fits(self, wanted: WeightsWanted | None) -> bool:
        """True if it has the weights wanted, as far as this router knows."""
        return wanted is None or self.is_fixed or wanted.fits(self.held)

    def report(self, chunk: Chunk) -> None:
        """Note what the last chunk of a request tells of the replica."""
        self.held = chunk.held or self.held
        if (load := chunk.load) is not None:
            self.reported, self.others = load, max(0, load.weight - self.weight)


def cheapest(places: Sequence[W], weight: int, home: W | None = None, saved: int = 0) -> W | None:
    """Return the replica with room where a request of `weight` costs least; None if none has room.

    The cost is the work there with this request, over the measured speed. `home` has a prefix of it, worth `saved` of
    its weight, and gets it unless another one has less to do by more than that and `TOLERANCE`, and (if anything is
    saved) `OVERLOAD` times less.
    """
    fit = [place for place in places if place.has_room]
    fit = [place for place in fit if not place.is_stuck] or fit
    if not fit:
        return None
    fastest = max(place.tokens_per_s for place in fit)

    def cost(place: W, more: int) -> float:
        speed = max(place.tokens_per_s / fastest, SLOWEST) if place.tokens_per_s else 1.0
        return (place.weight + place.others + more) / speed

    least = min(fit, key=lambda place: cost(place, weight))
    if home is None or home not in fit:
        return least
    allowed = cost(least, weight + saved + TOLERANCE)
    if saved:
        allowed = max(allowed, OVERLOAD * cost(least, weight))
    return home if cost(home, weight) <= allowed else least


@dataclass(eq=False)
class Claim:
    """Weights that the requests of one group want, and a record of the weights that they got."""

    order: int
    """Requests with a smaller order are placed first."""
    wanted: WeightsWanted | None = None
    """None: the first weights of the engines."""
    hold: Hold | None = None
    """None if the weights may change under running requests, or the holder was lost."""
    vouched: dict[Acknowledged, None] = field(default_factory=dict)
    """Acknowledgements of the weights that its tokens were sampled from."""
    pulls: list[Pull] = field(default_factory=list)
    """Weight changes that replicas reported with its tokens."""
    tokens_at: Counter[str] = field(default_factory=Counter)
    """Tokens by the replica that sampled them."""
    stats: EngineStats | None = None
    """Last statistics of an engine that sampled for it."""
    waiting: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Entered while a request is at a replica; requests side by side enter it each."""
    left: set[str] = field(default_factory=set)
    """Replicas that it was moved away from."""
    lost: str = ""
    """The last holder that was lost."""
    prefixes: KnownPrefixes[tuple[KnownReplica, int]] = field(default_factory=KnownPrefixes)
    """By prompt, and by prompt with reply: the place that has it, and its length."""
    _again: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_exact(self) -> bool:
        """True if its tokens are all of one version."""
        return self.wanted is not None and self.wanted.hash is not None

    def note(self, place: KnownReplica, chunk: Chunk) -> None:
        """Note what a chunk of one of its requests tells."""
        self.vouched |= dict.fromkeys(chunk.weights)
        self.pulls += chunk.pulls
        self.tokens_at[place.name] += len(chunk.more.output_ids)
        if chunk.load is not None:
            self.stats = chunk.load.stats


class _Tokens:
    """Tokens of a request so far, joined only when they are asked for: the cost of a chunk grows with what is new."""

    def __init__(self, begun: Completion | None) -> None:
        self._parts = [begun] if begun is not None and begun.output_ids else []

    def add(self, more: Completion) -> None:
        self._parts.append(more)

    def whole(self) -> Completion | None:
        """All tokens so far; None if there are none and no end."""
        self._parts = [Completion.join(self._parts)] if self._parts else []
        return self._parts[0] if self._parts else None

    def partial(self) -> Completion | None:
        """All tokens so far for another request; None if there are none."""
        whole = self.whole()
        return replace(whole, finish=None) if whole is not None and whole.output_ids else None


@dataclass(order=True)
class _Waiter:
    """A request that waits for room."""

    order: tuple[int, int]
    weight: int = field(compare=False)
    claim: Claim = field(compare=False)
    prompt_ids: tuple[int, ...] = field(compare=False)
    place: asyncio.Future[KnownReplica | None] = field(compare=False)
    """None: look again, because replicas came or went."""


class RequestRouter:
    """Sends the requests of one session worker, for one policy, to replicas."""

    def __init__(self, replicas: Iterable[Replica] = (), max_losses: int = 3) -> None:
        """`max_losses`: a request that loses so many replicas one after the other, without a token between, raises the
        error of the last one."""
        self._places: list[KnownReplica] = []
        self._use(KnownReplica(replica=replica) for replica in replicas)
        self._max_losses = max_losses
        self._stuck: Collection[str] = ()
        """Names of replicas that make no progress at the moment."""
        self._lost: set[str] = set()
        """Names of replicas that have died."""
        self._claims: set[Claim] = set()
        self._waiting: list[_Waiter] = []
        self._numbers = count()
        self._met = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    def meet(self, replicas: Sequence[Replica], stuck: Collection[str] = ()) -> None:
        """Use these replicas from now, those in `stuck` only if all are. Requests at others go on; those that wait look
        again."""
        known = {place.name: place for place in self._places}
        fresh = [replica for replica in replicas if replica.name not in self._lost]
        self._use(known.get(replica.name) or KnownReplica(replica=replica) for replica in fresh)
        self._stuck = stuck
        for place in self._places:
            place.is_stuck = place.name in stuck
        names = {replica.name for replica in fresh}
        self._void([claim for claim in self._claims if claim.hold is not None and claim.hold.replica not in names])
        self._met.set()
        self._met = asyncio.Event()
        self._look_again()

    def close(self) -> None:
        """Cancel calls in the background."""
        for task in self._background:
            task.cancel()

    # -------------------------------------------------------------------------------------------------------- claims

    async def claim(self, wanted: WeightsWanted, order: int) -> Claim:
        """Return the claim of a group, once a replica has the weights wanted.

        Waits for a replica, and for its pull; unblocked by `meet`, and as `Replica.hold` is. Raises the error of the
        last replica after `max_losses` of them.
        """
        claim = Claim(order, wanted)
        for num_losses in count(1):
            place = await self._holder(claim)
            place.num_claims += 1
            try:
                hold = await self._hold_at(place, wanted)
            except LOSSES as error:
                self._lose(place, error)
                if num_losses >= self._max_losses:
                    raise
                continue
            finally:
                place.num_claims -= 1
            if hold is not None:
                return self._with(claim, hold)
        raise AssertionError("unreachable")

    async def try_claim(self, wanted: WeightsWanted, order: int) -> Claim | None:
        """Return the claim of a group if a replica has the weights wanted now; None otherwise. Raises the error of a
        replica that is lost meanwhile."""
        claim = Claim(order, wanted)
        place = await self._holder(claim)
        try:
            hold = await place.replica.hold(wanted, waits=False)
        except LOSSES as error:
            self._lose(place, error)
            raise
        if hold is None:
            return None
        self._note_hold(place, hold)
        return self._with(claim, hold)

    def release(self, claim: Claim) -> None:
        """End a claim, when its group has ended."""
        self._claims.discard(claim)
        if claim.hold is not None:
            self._release(claim.hold)
            claim.hold = None

    async def move(self, source: str, to: str) -> int:
        """Hold the weights of the groups of `source` at `to` instead, if that has the same ones; their requests go on
        there once `source` aborts them. Returns the number of groups that moved."""
        taker, num_moved = self._find(to), 0
        if taker is None or source == to:
            return 0
        for claim in [claim for claim in self._claims if claim.hold is not None and claim.hold.replica == source]:
            assert claim.wanted is not None
            try:
                hold = await taker.replica.hold(claim.wanted, waits=False)
            except LOSSES as error:
                self._lose(taker, error)
                break
            if hold is None or claim not in self._claims or claim.hold is None:
                if hold is not None:
                    self._let_go(taker, hold)
                continue
            before, claim.hold = claim.hold, hold
            claim.left.add(source)
            claim.left.discard(to)
            self._note_hold(taker, hold)
            taker.num_claims += 1
            self._release(before)
            num_moved += 1
        return num_moved

    def _with(self, claim: Claim, hold: Hold) -> Claim:
        """Register a claim that got its hold."""
        self._claims.add(claim)
        if hold.held is None:
            claim.wanted = None
        if hold.id:
            assert hold.held is not None
            claim.hold, claim.wanted = hold, WeightsWanted(hold.held.version, hold.held.hash)
            if (place := self._find(hold.replica)) is not None:
                place.num_claims += 1
        return claim

    async def _hold_at(self, place: KnownReplica, wanted: WeightsWanted) -> Hold | None:
        """Hold weights at a place. No call is made where there is nothing to hold, and the weights are known."""
        if place.is_free and place.fits(wanted):
            return Hold("", place.name, place.held)
        hold = await place.replica.hold(wanted)
        if hold is not None:
            self._note_hold(place, hold)
        return hold

    def _note_hold(self, place: KnownReplica, hold: Hold) -> None:
        place.is_fixed, place.is_free, place.held = hold.held is None, not hold.id, hold.held or place.held

    def _release(self, hold: Hold) -> None:
        if (place := self._find(hold.replica)) is None:
            return
        place.num_claims -= 1
        self._let_go(place, hold)

    def _let_go(self, place: KnownReplica, hold: Hold) -> None:
        """Release a hold in the background: a replica that does not answer has it no more, or will answer."""
        task = asyncio.create_task(_release_at(place.replica, hold))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _holder(self, claim: Claim) -> KnownReplica:
        """The place for a claim: near, where the driver has put the group; then with the fewest groups, then of those
        with the weights wanted, then with the least to do. Waits for a replica; unblocked by `meet`."""
        while not self._places:
            await self._met.wait()

        def order(place: KnownReplica) -> tuple[bool, bool, int, bool, int]:
            is_far, is_other = not place.replica.is_near, not place.fits(claim.wanted)
            return place.is_stuck, is_far, place.num_claims, is_other, place.weight + place.others

        return min(self._places, key=order)

    async def _hold_again(self, claim: Claim, loss: WorkerError | None) -> None:
        """Hold the weights of a claim whose holder was lost, at another replica or at the successor.

        Waits for a replica if there is none; unblocked by `meet`. Raises the loss if no replica can have the weights.
        """
        async with claim._again:
            while claim.hold is None:
                place = await self._holder(claim)
                assert claim.wanted is not None
                try:
                    hold = await place.replica.hold(claim.wanted)
                except LOSSES as error:
                    self._lose(place, error)
                    loss = error
                    continue
                if hold is None and (hold := await self._hold_elsewhere(claim, place)) is None:
                    detail = f"no other replica has version {claim.wanted.version}: the group is rolled out again"
                    raise WorkerDied(
                        claim.lost, "sampling a request", detail if loss is None else f"{loss.detail}; {detail}"
                    )
                claim.hold = hold
                if (holder := self._find(hold.replica)) is not None:
                    self._note_hold(holder, hold)
                    holder.num_claims += 1

    async def _hold_elsewhere(self, claim: Claim, but: KnownReplica) -> Hold | None:
        assert claim.wanted is not None
        for place in [place for place in self._places if place is not but]:
            try:
                if (hold := await place.replica.hold(claim.wanted)) is not None:
                    return hold
            except LOSSES as error:
                self._lose(place, error)
        return None

    # ------------------------------------------------------------------------------------------------------ requests

    async def generate(
        self, request: Request, claim: Claim, take: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Sample a request to its end, wherever that is. `take` gets its new tokens as they come.

        Waits for room at a replica, in order of claims, and for its tokens; unblocked by `meet`, by ends of other
        requests, and by its chunks. Raises the errors of `Replica.generate`, those of lost replicas only after
        `max_losses` without a token between, or if no replica has the weights of the claim any more.
        """
        tokens, num_losses, loss = _Tokens(request.begun), 0, None
        weight = request_weight(len(request.prompt_ids) + request.num_begun)
        while True:
            if claim.is_exact and claim.hold is None:
                await self._hold_again(claim, loss)
            place = None if self._waiting else self._choose(request.prompt_ids, weight, claim)
            if place is None and (place := await self._room(request.prompt_ids, weight, claim)) is None:
                continue
            last: Chunk | None = None
            is_holder = claim.hold is not None and claim.hold.replica == place.name
            hold = claim.hold.id if claim.hold is not None and is_holder else ""
            sent = Request(
                request.id, request.prompt_ids, request.sampling, request.seed, tokens.partial(), request.sampled,
                claim.wanted, hold, take is not None,
            )  # fmt: skip
            self._note_prefix(request.prompt_ids, place, claim)
            try:
                if not place.fits(claim.wanted) and not is_holder:
                    await self._ready(place, claim)
                with claim.waiting:
                    async for chunk in place.replica.generate(sent):
                        tokens.add(chunk.more)
                        claim.note(place, chunk)
                        last = chunk
                        if chunk.more.output_ids:
                            num_losses = 0
                        if take is not None:
                            take(chunk.more)
            except LOSSES as error:
                self._lose(place, error)
                num_losses, loss = num_losses + 1, error
                if num_losses >= self._max_losses:
                    raise
            finally:
                place.remove(weight)
                self._wake()
            done = tokens.whole()
            if done is not None and len(done.output_ids) >= request.sampling.max_new_tokens and done.finish != "stop":
                done = replace(done, finish="length")  # the replica was lost before it could tell
            if last is not None:
                place.report(last)
            if done is not None and done.finish in ("stop", "length"):
                self._note_prefix(request.prompt_ids + done.output_ids, place, claim)
                return done
            if last is not None and is_holder and last.reason == "weights" and claim.hold is not None:
                self._void([claim] if claim.hold.id == hold else [])  # the holder has other weights
            elif last is not None:
                claim.left.add(place.name)  # it is drained, or about to change its weights
            await asyncio.sleep(0)  # a replica of this process may have refused without a turn of the event loop

    async def score(self, token_ids: tuple[int, ...], claim: Claim) -> Scored:
        """Return logprobs of given tokens. Goes on elsewhere as `generate` does."""
        loss: WorkerError | None = None
        for num_losses in count(1):
            if claim.is_exact and claim.hold is None:
                await self._hold_again(claim, loss)
            place = self._find(claim.hold.replica) if claim.hold is not None else await self._holder(claim)
            if place is None:
                continue
            try:
                if not place.fits(claim.wanted) and claim.hold is None:
                    await self._ready(place, claim)
                with claim.waiting:
                    scored = await place.replica.score(token_ids)
            except LOSSES as error:
                self._lose(place, error)
                loss = error
                if num_losses >= self._max_losses:
                    raise
                continue
            claim.vouched |= dict.fromkeys(scored.weights)
            return scored
        raise AssertionError("unreachable")

    async def _ready(self, place: KnownReplica, claim: Claim) -> None:
        """Return once a place has weights no older than wanted. One call serves all requests that wait for it."""
        if claim.wanted is None or claim.is_exact:
            return
        if place.pulling is None:
            place.pulling = asyncio.ensure_future(place.replica.hold(claim.wanted))
            place.pulling.add_done_callback(lambda _: setattr(place, "pulling", None))
        if (hold := await asyncio.shield(place.pulling)) is not None:
            self._note_hold(place, hold)

    async def _room(self, prompt_ids: tuple[int, ...], weight: int, claim: Claim) -> KnownReplica | None:
        """Return the place for a request, which counts there from now; None if replicas came or went meanwhile.

        Waits for room; unblocked by the end of another request, in order of claims.
        """
        waiter = _Waiter(
            (claim.order, next(self._numbers)), weight, claim, prompt_ids, asyncio.get_running_loop().create_future()
        )
        heappush(self._waiting, waiter)
        self._wake()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and (place := waiter.place.result()) is not None:
                place.remove(weight)
                self._wake()
            raise

    def _choose(self, prompt_ids: tuple[int, ...], weight: int, claim: Claim) -> KnownReplica | None:
        """The place for a request, which counts there from now; None if it must wait."""
        for place in self._near:
            if place.has_slot and not place.is_stuck and self._serves(place, claim):
                place.add(weight)
                return place
        fit = [place for place in self._places if self._serves(place, claim)]
        if not fit and not claim.is_exact:
            fit = self._places
        home, saved = claim.prefixes.longest(prompt_ids) or (None, 0) if len(fit) > 1 else (None, 0)
        place = cheapest(fit, weight, home, saved // PREFIX_TOKENS)
        if place is not None:
            place.add(weight)
        return place

    def _note_prefix(self, ids: tuple[int, ...], place: KnownReplica, claim: Claim) -> None:
        if len(self._places) > 1:  # else it decides nothing
            claim.prefixes.put(ids, (place, len(ids)))

    def _serves(self, place: KnownReplica, claim: Claim) -> bool:
        """True if a place has the weights of a claim, or can pull them, and the claim was not moved away from it."""
        if claim.hold is not None and claim.hold.replica == place.name:
            return True
        return place.name not in claim.left and (place.fits(claim.wanted) or not claim.is_exact)

    def _wake(self) -> None:
        """Place waiting requests, in order, as long as a place has room."""
        kept: list[_Waiter] = []
        while self._waiting and any(place.has_room for place in self._places):
            waiter = heappop(self._waiting)
            if waiter.place.done():
                continue
            if (place := self._choose(waiter.prompt_ids, waiter.weight, waiter.claim)) is None:
                kept.append(waiter)
            else:
                waiter.place.set_result(place)
        if kept:
            self._waiting += kept
            heapify(self._waiting)

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.place.done():
                waiter.place.set_result(None)

    # ------------------------------------------------------------------------------------------------------- replicas

    def _use(self, places: Iterable[KnownReplica]) -> None:
        self._places = list(places)
        self._near = [place for place in self._places if place.replica.is_near]
        """Replicas in this process."""

    def _find(self, name: str) -> KnownReplica | None:
        return next((place for place in self._places if place.name == name), None)

    def _lose(self, place: KnownReplica, error: WorkerError) -> None:
        """Use a replica no more, or for a while if it only did not answer in time."""
        if place not in self._places:
            return
        self._use(other for other in self._places if other is not place)
        if isinstance(error, DeadlineExceeded):
            asyncio.get_running_loop().call_later(REST_S, self._return, place)
        else:
            self._lost.add(place.name)
        lost = [claim for claim in self._claims if claim.hold is not None and claim.hold.replica == place.name]
        for claim in lost:
            assert claim.hold is not None
            self._let_go(place, claim.hold)
        self._void(lost)
        self._look_again()

    def _void(self, claims: Iterable[Claim]) -> None:
        """Note that the holders of these claims are lost."""
        for claim in claims:
            assert claim.hold is not None
            claim.lost, claim.hold = claim.hold.replica, None

    def _return(self, place: KnownReplica) -> None:
        if place.name not in self._lost and self._find(place.name) is None:
            self.meet([*(other.replica for other in self._places), place.replica], self._stuck)


async def _release_at(replica: Replica, hold: Hold) -> None:
    with suppress(*LOSSES):  # its holds are gone with it
        await replica.release(hold)
