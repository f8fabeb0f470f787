"""Weight synchronisation between actor and rollouts: publish, pull, and the only order of a weight change.

Every published version has a content hash. Every replica acknowledges `(version, hash)` of its loaded weights after a
change. Every group carries the acknowledgements of the versions its tokens were sampled from. A group is refused before
training if a token's version was not acknowledged, or acknowledged with another hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rlsys.contracts import Actor, Arrival, Published, Relays
from rlsys.errors import DeadlineExceeded, WeightsMismatch, WorkerError
from rlsys.monitoring.events import Events, WeightsPublished
from rlsys.types import Acknowledged, Group, PolicyVersion
from rlsys.util.deadlines import timeout
from rlsys.weight_sync.freshness import Freshness
from rlsys.weight_sync.links import BYTES_PER_S, deadline_s
from rlsys.weight_sync.manifest import Manifest

T = TypeVar("T")
ON_THE_WAY = 2
"""Versions that may be on their way to the relays. A relay drops a version that as many newer ones overtake, and parts
of one come from several nodes, some of them sooner."""


class ChangingReplica(Protocol):
    """Interface of a rollout replica for a weight change."""

    name: str

    def close_gate(self) -> None:
        """Start no new group from now."""

    async def pause(self) -> None:
        """Return once no token is being sampled: running work has finished (`between`) or is halted (`inflight`)."""

    async def resume(self) -> None: ...

    async def verify_weights(self, manifest: Manifest) -> str:
        """Return the content hash of the weights that the engine computes with, which is that of `manifest`.

        Raises `WeightsMismatch` naming the tensors that differ.
        """

    async def verify_probe(self, manifest: Manifest) -> float | None:
        """Return the mean difference of the engine's logprobs to the probe, in nats; None without a probe.

        Raises `WeightsMismatch` if it is too large.
        """

    async def stop(self, why: WorkerError) -> None:
        """Abort all running work: its tokens must not be trained."""

    def open_gate(self) -> None: ...


async def change_weights(
    replica: ChangingReplica, manifest: Manifest, load: Callable[[], Awaitable[None]]
) -> Acknowledged:
    """Move a replica to the weights of `manifest`, in the only order:

    close the gate, pause, load, resume (always), verify the weights, verify the probe, open the gate.

    Both are verified while sampling continues. Tokens sampled before their end count only if both succeed: nothing
    acknowledges the version before this function returns. On a failure the replica is stopped: its running work ends
    with an error and is reissued elsewhere. Its gate stays closed, because its weights are unverified. Raises
    `WeightsMismatch`.
    """
    replica.close_gate()
    try:
        await replica.pause()
        try:
            await load()
        finally:
            await replica.resume()
        held = await replica.verify_weights(manifest)
        difference = await replica.verify_probe(manifest)
    except BaseException as error:
        known = isinstance(error, WorkerError)
        await replica.stop(error if known else WorkerError(replica.name, "changing weights", repr(error)))
        raise
    replica.open_gate()
    return Acknowledged(replica.name, manifest.version, held, difference)


@dataclass
class WeightSync:
    """Publishes versions for the driver, and verifies the versions that groups were sampled from.

    A publish ends before the weights arrive at any relay. Their arrival and hash are known later; callers that need the
    hash wait for it.
    """

    actor: Actor
    relays: Relays
    transfer_s: float
    """Least deadline in seconds of one publish, and of each of up to two waits for its arrival, see `deadline_s`. After
    the first, the actor announces the version again, or raises the error that delayed it."""
    max_age: int
    """Maximum age of a token, in versions: hashes of older versions are removed."""
    published: dict[PolicyVersion, str] = field(default_factory=dict)
    """Content hash of each version that arrived, in this session or (restored) before."""
    events: Events = field(default_factory=Events)
    """Receives the arrival of each version."""
    kept: set[PolicyVersion] = field(default_factory=set)
    """Versions whose hashes are kept at any age."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """`weights/*` of the newest version that arrived in this session."""
    _freshness: Freshness = field(init=False)
    _arriving: dict[PolicyVersion, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _num_bytes: int = field(default=0, init=False)
    """Bytes of the newest version."""
    _bytes_per_s: float = field(default=BYTES_PER_S, init=False)
    """Speed at which the newest version arrived, copying and hashing included."""

    def __post_init__(self) -> None:
        self._freshness = Freshness(self.max_age)

    async def publish(self, version: PolicyVersion) -> Published:
        """Publish the actor's weights as `version`; return once the bytes are about to leave the actor.

        Waits for the version `ON_THE_WAY` before it to arrive; unblocked by that, or by its deadline. Also raises the
        error of an earlier version that did not arrive.
        """
        for earlier in [task for task in self._arriving.values() if task.done()]:
            earlier.result()
        await self.wait_for_arrival(version - ON_THE_WAY)
        receipt = await with_deadline(
            self.actor.publish(version), self._deadline_s(), "actor", f"publishing version {version}"
        )
        self._num_bytes = receipt.num_bytes
        took_s = self._freshness.note_publish(version, asyncio.get_running_loop().time())
        self.metrics.pop("weights/freshness_s", None)
        if took_s is not None:
            self.metrics["weights/freshness_s"] = took_s
        self._arriving[version] = asyncio.create_task(self._arrive(receipt))
        return receipt

    def note_pulls(self, group: Group) -> None:
        """Note the weight changes that a group has reported a moment ago, to versions of its policy."""
        report = group.report
        assert report is not None, f"group {group.group_id} has no report"
        pulls = [pull for pull in report.pulls if pull.policy == group.policy]
        self._freshness.note_pulls(pulls, asyncio.get_running_loop().time() - report.busy.end_s)

    async def wait_for_arrival(self, version: PolicyVersion) -> str | None:
        """Return the hash of `version`, once it has arrived; None if it was never published, or is removed.

        Raises the error that prevented the arrival.
        """
        if version in self._arriving:
            await asyncio.shield(self._arriving[version])
        return self.published.get(version)

    async def wait_for_arrivals(self) -> None:
        """Return once all published versions have arrived. Raises the error that prevented an arrival."""
        await asyncio.gather(*(self.wait_for_arrival(version) for version in list(self._arriving)))

    def give_up(self) -> None:
        """Stop waiting for arrivals: their versions count as never published."""
        for task in self._arriving.values():
            task.cancel()
        self._arriving.clear()

    async def verify(self, group: Group) -> None:
        """Raise `WeightsMismatch` if a version in the group is older than its permit, or lacks an acknowledgement of
        the published hash. Waits for versions that are arriving."""
        if group.oldest_version < group.permit_version:
            raise WeightsMismatch(
                group.replica,
                f"rolling out group {group.group_id}",
                f"tokens of version {group.oldest_version}, but its permit asks for {group.permit_version} or newer",
            )
        for span in group.versions:
            expected = await self.wait_for_arrival(span.version)
            held = {a.hash: a.replica for a in group.weights if a.version == span.version}
            if held.keys() != {expected}:
                wrong = [name for name in held if name != expected]
                raise WeightsMismatch(
                    held[wrong[0]] if wrong else group.replica,
                    f"rolling out group {group.group_id}",
                    f"tokens of version {span.version}, published as {expected}, acknowledged as "
                    f"{' and '.join(wrong) or None}",
                )

    async def _arrive(self, receipt: Published) -> None:
        """Wait for the relay tier to have the version, then record its hash.

        The actor raises the error that kept a version from the relays. Without such an error, the relays that had it
        died before they could report, and it is announced again.
        """
        version = receipt.version
        try:
            arrival = await self._arrival(version)
        except WorkerError:
            await self.actor.announce_again(version)
            arrival = await self._arrival(version)
        self.published[version] = arrival.hash
        if arrival.num_bytes and arrival.seconds:
            self._bytes_per_s = min(BYTES_PER_S, arrival.num_bytes / arrival.seconds)
        del self._arriving[version]
        for old in [v for v in self.published if v < version - self.max_age and v not in self.kept]:
            del self.published[old]
        sizes = (arrival.num_bytes, arrival.num_sent)
        if arrival.num_bytes:
            self.metrics["weights/sent_share"] = arrival.num_sent / arrival.num_bytes
        self.events.emit(WeightsPublished(version, arrival.hash, *sizes, receipt.stall_s, arrival.seconds))

    async def _arrival(self, version: PolicyVersion) -> Arrival:
        phase = f"receiving version {version}"
        return await with_deadline(self.relays.arrival(version), self._deadline_s(), "relays", phase)

    def _deadline_s(self) -> float:
        return deadline_s(self.transfer_s, self._num_bytes, self._bytes_per_s)


async def with_deadline(work: Awaitable[T], seconds: float, worker: str, phase: str) -> T:
    """Await `work` for at most `seconds`; then raise `DeadlineExceeded` with the worker and the phase."""
    try:
        async with timeout(seconds):
            return await work
    except TimeoutError as error:
        raise DeadlineExceeded(worker, phase, f"no answer within {seconds:g} s") from error
