"""Weights on their way from the actor to the rollouts: publish, pull, and the one order of a weight change.

Every published version has a content hash. Every replica acknowledges `(version, hash)` of what it holds after a
change, and every group carries the acknowledgements of the versions its tokens were sampled from. A token of a version
that was never acknowledged, or acknowledged with another hash, is refused before it can be trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol, TypeVar

from rlsys.contracts import Actor, Arrival, Published, Relays
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerError
from rlsys.types import Acknowledged, Group, PolicyVersion
from rlsys.util.deadlines import timeout

T = TypeVar("T")
ALIGNMENT = 64
"""Bytes: of a cache line, and more than any dtype needs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's, e.g. `bfloat16`) and shape of one published tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """Bytes `start` to `start + num_bytes` of a tensor: all of it, unless it is too big for one bucket."""

    tensor: TensorSpec
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some pieces that travel together, each from a multiple of `ALIGNMENT` bytes on."""

    hash: str
    """Of its bytes, the padding between pieces included: the name by which relays ask each other for it."""
    num_bytes: int
    pieces: tuple[BucketPiece, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version consists of."""

    version: PolicyVersion
    hash: str
    """Content hash over names, shapes, dtypes and bytes of all tensors."""
    buckets: tuple[Bucket, ...]
    probe: Probe | None = None
    """Lets a replica show that it computes with these weights, not only that it has them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the trainer's own forward says of some tokens under the weights it publishes."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `token_ids[1:]`, at temperature 1."""

    def difference(self, logprobs: Sequence[float]) -> float:
        """Mean |difference| to another's logprobs of the same tokens, in nats."""
        return fmean(abs(own - other) for own, other in zip(self.logprobs, logprobs, strict=True))


class Replica(Protocol):
    """A rollout replica as the order of a weight change sees it."""

    name: str

    def close_gate(self) -> None:
        """No new group starts from now."""
        ...

    async def pause(self) -> None:
        """Return once no token is being sampled: running work has finished (`between`) or is halted (`inflight`)."""
        ...

    async def resume(self) -> None: ...

    async def verify_probe(self, manifest: Manifest) -> float | None:
        """How far the engine's logprobs are from the manifest's probe, in nats on average; None if it has none.

        Raises `WeightsMismatch` if that is too far.
        """
        ...

    async def stop(self, why: WorkerError) -> None:
        """End everything that runs: its tokens must not be trained."""
        ...

    def open_gate(self) -> None: ...


async def change_weights(replica: Replica, manifest: Manifest, load: Callable[[], Awaitable[str]]) -> Acknowledged:
    """Move a replica to the weights of `manifest`, in the one order there is:

    close the gate, pause, load (returns the content hash of what was loaded), verify, resume (always), prove, open the
    gate.

    If any of it fails, the replica is stopped: what it runs ends with an error and is issued again elsewhere, and its
    gate stays closed, because nobody vouches for its weights. Raises `WeightsMismatch`.
    """
    replica.close_gate()
    try:
        await replica.pause()
        try:
            held = await load()
            if held != manifest.hash:
                detail = f"version {manifest.version} was published as {manifest.hash}, but {held} is loaded"
                raise WeightsMismatch(replica.name, "changing weights", detail)
        finally:
            await replica.resume()
        difference = await replica.verify_probe(manifest)
    except BaseException as error:
        known = isinstance(error, WorkerError)
        await replica.stop(error if known else WorkerError(replica.name, "changing weights", repr(error)))
        raise
    replica.open_gate()
    return Acknowledged(replica.name, manifest.version, held, difference)


@dataclass
class WeightSync:
    """The driver's side: publishes versions and checks what groups were sampled from.

    A publish is over before the weights have arrived anywhere. That they did, and their hash, is known later; whoever
    needs the hash waits for it.
    """

    actor: Actor
    relays: Relays
    transfer_s: float
    """Deadline of one publish, and of its arrival after that, in seconds. An arrival gets it twice: if the version does
    not come, the actor is asked why, or to announce it again."""
    max_age: int
    """Versions that a token may be older than the newest: hashes of older versions are forgotten."""
    published: dict[PolicyVersion, str] = field(default_factory=dict)
    """Content hash of each version that arrived, in this session or (restored) before."""
    on_arrival: Callable[[Published, Arrival], None] = lambda published, arrival: None
    kept: set[PolicyVersion] = field(default_factory=set)
    """Versions that are not forgotten, whatever their age."""
    _arriving: dict[PolicyVersion, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def publish(self, version: PolicyVersion) -> Published:
        """Publish the actor's weights as `version`; returns once the bytes have left the actor.

        Raises what an earlier version failed to arrive for, too.
        """
        for earlier in [task for task in self._arriving.values() if task.done()]:
            earlier.result()
        receipt = await with_deadline(
            self.actor.publish(version), self.transfer_s, "actor", f"publishing version {version}"
        )
        self._arriving[version] = asyncio.create_task(self._arrive(receipt))
        return receipt

    async def arrived(self, version: PolicyVersion) -> str | None:
        """The hash of `version`, once it has arrived; None if it was never published, or is forgotten.

        Raises what it failed to arrive for.
        """
        if version in self._arriving:
            await asyncio.shield(self._arriving[version])
        return self.published.get(version)

    async def settled(self) -> None:
        """Return once everything published has arrived. Raises what it failed to arrive for."""
        await asyncio.gather(*(self.arrived(version) for version in list(self._arriving)))

    def give_up(self) -> None:
        """Wait no more for what is arriving."""
        for task in self._arriving.values():
            task.cancel()

    async def verify(self, group: Group) -> None:
        """Raise `WeightsMismatch` unless every version in the group is as new as its permit asks for, and was
        acknowledged with the published hash. Waits for those that are arriving."""
        if group.oldest_version < group.permit_version:
            raise WeightsMismatch(
                group.replica,
                f"rolling out group {group.group_id}",
                f"tokens of version {group.oldest_version}, but its permit asks for {group.permit_version} or newer",
            )
        acknowledged = {a.version: a.hash for a in group.weights}
        for span in group.versions:
            held, expected = acknowledged.get(span.version), await self.arrived(span.version)
            if held is None or held != expected:
                raise WeightsMismatch(
                    group.replica,
                    f"rolling out group {group.group_id}",
                    f"tokens of version {span.version}, published as {expected}, acknowledged as {held}",
                )

    async def _arrive(self, receipt: Published) -> None:
        """Wait for the relay tier to have it, then write down its hash.

        The actor knows what kept a version from the relays, and raises it. If nothing did, those that had it died
        before they could tell, and are told again.
        """
        version = receipt.version
        try:
            arrival = await self._arrival(version)
        except WorkerError:
            await self.actor.announce_again(version)
            arrival = await self._arrival(version)
        self.published[version] = arrival.hash
        del self._arriving[version]
        for old in [v for v in self.published if v < version - self.max_age and v not in self.kept]:
            del self.published[old]
        self.on_arrival(receipt, arrival)

    async def _arrival(self, version: PolicyVersion) -> Arrival:
        phase = f"taking in version {version}"
        return await with_deadline(self.relays.arrival(version), self.transfer_s, "relays", phase)


async def with_deadline(work: Awaitable[T], seconds: float, worker: str, phase: str) -> T:
    """Await `work` for at most `seconds`; then raise `DeadlineExceeded` naming the worker and what it was doing."""
    try:
        async with timeout(seconds):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded(worker, phase, f"no answer within {seconds:g} s") from error
