"""Weights of one replica: pulled, changed in the one order, verified, acknowledged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rlsys.errors import WeightsMismatch, WorkerError
from rlsys.routing.requests import LOSSES
from rlsys.types import Acknowledged, PolicyVersion, Pull, VersionSpan
from rlsys.weight_sync.manifest import Manifest
from rlsys.weight_sync.sync import change_weights
from workers.engines.engine import Engine

if TYPE_CHECKING:
    from torch import Tensor

ACKNOWLEDGEMENTS_KEPT = 64
"""Newest versions whose acknowledgement is kept. Older ones are kept while groups hold them."""
NAMED = 3
"""Tensors that an error names; it counts the others."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Settings of a replica's weight changes."""

    when: Literal["between", "inflight", "beside"]
    """`between`: once no group holds the old weights. `inflight`: under running requests. `beside`: those finish on
    their weights."""
    tolerance: float
    """Largest allowed mean |difference| between the engine's logprobs and the trainer's, in nats. A larger one means
    that the engine does not compute with the published weights."""
    verify_s: float = 0.0
    """Seconds after which an idle replica verifies its weights again; 0: never."""


Pulled: TypeAlias = "tuple[Manifest, Mapping[str, Tensor]]"
"""One version: its manifest, and its tensors by name."""


class Puller(Protocol):
    """Source of a replica's weights."""

    async def pull(self, at_least: PolicyVersion) -> Pulled:
        """Return the newest published weights, no older than `at_least`. Raises `DeadlineExceeded`."""


class ReplicaWeights:
    """Implements `rlsys.weight_sync.sync.ChangingReplica` for one engine.

    `ensure` waits for a change under way, then for the version, then (`between`) for the holds of groups to end.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        puller: Puller | None,
        change: WeightChange,
        *,
        base: str | None = None,
        emptied: Callable[[], Awaitable[bool]],
        on_loss: Callable[[WorkerError], None],
    ) -> None:
        """`name` is that of the replica. Without a `puller` the engine keeps its first weights. `base` is the hash of
        the base to which the engine applies adapters, None if it loads whole weights. `emptied` returns once no group
        holds the weights and no request runs, True if it had to wait; `on_loss` gets the failure of a change."""
        self.name, self.when = name, change.when
        self._engine, self._puller, self._base = engine, puller, base
        self._tolerance, self._emptied, self._on_loss = change.tolerance, emptied, on_loss
        self._manifest: Manifest | None = None
        """That of the loaded weights; None before the first pull."""
        self._acknowledged: dict[PolicyVersion, Acknowledged] = {}
        self._change: asyncio.Task[None] | None = None
        """The weight change under way. No caller that is cancelled ends it."""
        self._verification: asyncio.Task[None] | None = None
        """The newest verification of loaded weights."""
        self._gate_open = True
        self.failure: WorkerError | None = None
        """The failure that closed the gate for good."""
        self._pulls: list[Pull] = []
        self.is_loading = False

    # ------------------------------------------------------------------------------------------------- what is loaded

    @property
    def acknowledgement(self) -> Acknowledged | None:
        """The acknowledgement of the loaded weights; None before the first pull."""
        return self._acknowledged[max(self._acknowledged)] if self._acknowledged else None

    @property
    def is_fixed(self) -> bool:
        """True if the engine keeps its first weights."""
        return self._puller is None

    @property
    def is_changing(self) -> bool:
        """True while groups must not begin on the loaded weights: a change is under way, or (`between`) waits."""
        return self.is_loading or (self.when == "between" and self._change is not None)

    def is_ready(self, version: PolicyVersion) -> bool:
        """True if a group that needs `version` or newer may begin now. True when `ensure` returns, and until the next
        `await`."""
        is_delayed = self.when == "between" and self._change is not None
        return self.is_fixed or (self._is_new_enough(version) and not is_delayed)

    async def acknowledgements_of(self, versions: Sequence[VersionSpan]) -> tuple[Acknowledged, ...]:
        """Return the acknowledgements of versions that tokens were sampled from.

        Waits for a weight change under way; unblocked by its end, which acknowledges the version. Raises the error of a
        change that failed: nothing vouches for its tokens.
        """
        if self.is_fixed:
            return ()
        if self._change is not None and not self.are_vouched(versions):
            await asyncio.wait([self._change])
        if not self.are_vouched(versions) and self.failure is not None:
            raise self.failure
        return tuple(self._acknowledged[span.version] for span in versions if span.version in self._acknowledged)

    def are_vouched(self, versions: Sequence[VersionSpan]) -> bool:
        """True if all of these versions are acknowledged, or the engine keeps its first weights."""
        return self.is_fixed or all(span.version in self._acknowledged for span in versions)

    def take_pulls(self) -> tuple[Pull, ...]:
        """Return the periods of the weight changes since the last call, from the pull to the open gate.

        With `between`, a period starts when the holds have ended: before that, the pull delays no group.
        """
        pulls, self._pulls = tuple(self._pulls), []
        return pulls

    # ------------------------------------------------------------------------------------------------ changing weights

    async def ensure(self, version: PolicyVersion) -> None:
        """Return once this replica has weights no older than `version`.

        Waits for a change under way, then pulls weights itself if they are still older. Unblocked by the relay
        receiving the version, and (`between`) by holds ending. Waits for a change that it does not need only with
        `between`, where a group that starts would delay that change.
        """
        if self._puller is None or (self._is_new_enough(version) and self.when != "between"):
            return
        while self._change is not None or not self._is_new_enough(version):
            if self._change is None:
                self._change = asyncio.create_task(self._change_weights(self._puller, version))
            await asyncio.shield(self._change)

    async def _change_weights(self, puller: Puller, version: PolicyVersion) -> None:
        """Change the weights. No change is under way any more when this ends, not one turn of the event loop later:
        otherwise `ensure` would wait for its end for ever."""
        try:
            await self._change_to(puller, version)
        except LOSSES as error:
            self._on_loss(error)
            raise
        finally:
            self._change = None

    async def _change_to(self, puller: Puller, version: PolicyVersion) -> None:
        """Change to `version` or newer."""
        if self._verification is not None:  # it reads what would change
            await asyncio.wait([self._verification])
        if not self._gate_open:
            detail = f"an earlier weight change failed, restart the replica: {self.failure}"
            raise WeightsMismatch(self.name, "starting a group", detail)
        began_s = time.monotonic()
        pulled = await self._pull_and_stage(puller, version)
        if self.when == "between" and await self._emptied():  # may take long
            began_s = time.monotonic()
            pulled = await self._pull_and_stage(puller, version, before=pulled)
        manifest, weights = pulled
        held = await change_weights(self, manifest, lambda: self._engine.load(manifest.version, weights))
        self._manifest = manifest
        self._acknowledged[held.version] = held
        self._pulls.append(Pull(self.name, began_s, time.monotonic(), held.version))

    async def verify_again(self) -> None:
        """Verify the loaded weights again, in case their memory was damaged; a change under way verifies by itself.

        Raises `WeightsMismatch`; then the replica is stopped, as after a change that failed.
        """
        if self._change is None and self._manifest is not None and self._gate_open:
            self._verification = asyncio.create_task(self._verify_loaded(self._manifest))
            await self._verification

    async def _verify_loaded(self, manifest: Manifest) -> None:
        try:
            await self.verify_weights(manifest)
        except LOSSES as error:
            self.close_gate()
            await self.stop(error)
            self._on_loss(error)
            raise

    def forget_acknowledged(self, used: Collection[PolicyVersion]) -> None:
        """Forget acknowledgements of old versions, except those `used`."""
        for version in sorted(self._acknowledged)[:-ACKNOWLEDGEMENTS_KEPT]:
            if version < min(used, default=version + 1):
                del self._acknowledged[version]

    def _is_new_enough(self, version: PolicyVersion) -> bool:
        return self._gate_open and self.acknowledgement is not None and self.acknowledgement.version >= version

    async def _pull_and_stage(self, puller: Puller, version: PolicyVersion, before: Pulled | None = None) -> Pulled:
        """Pull and stage the newest weights. Returns `before`, which is already staged, if there are no newer weights.

        A failure of the relay is raised with this replica's name, because a replica can be replaced.
        """
        try:
            manifest, weights = await puller.pull(version)
        except LOSSES as error:
            raise type(error)(self.name, f"pulling version {version} or newer", str(error)) from error
        if manifest.version < version:
            detail = f"asked for version {version} or newer, and got {manifest.version}"
            raise WeightsMismatch(self.name, "pulling weights", detail)
        if manifest.base != self._base:
            detail = (
                f"version {manifest.version} is {_kind(manifest.base)}, and this replica loads {_kind(self._base)}: "
                "give every machine the same files at model.path"
            )
            raise WeightsMismatch(self.name, "pulling weights", detail)
        if before is not None and before[0].version >= manifest.version:
            return before
        await self._engine.stage(weights)
        return manifest, weights

    # ------------------------------------------------------------------------------- the steps of `change_weights`

    def close_gate(self) -> None:
        self._gate_open = False

    async def pause(self) -> None:
        if self.when == "between":
            await self._emptied()
        self.is_loading = True  # from here, no hold is granted
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def verify_weights(self, manifest: Manifest) -> str:
        """Check every tensor that the engine computes with. A step changes few of the rounded weights, and logprobs so
        little that the probe's tolerance would let a stale tensor pass."""
        held = await self._engine.checksums()
        if manifest.checksums and not held:
            detail = (
                "the engine cannot tell which of the published tensors it computes with; use another rollout.engine"
            )
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", detail)
        wrong = sorted(spec.name for spec, value in held.items() if manifest.checksums.get(spec) != value)
        if wrong:
            detail = (
                f"the engine computes with other values than those published of {_first(wrong)}; the bytes were "
                "damaged on their way, or the engine left a tensor as it was: restart the replica"
            )
            raise WeightsMismatch(self.name, f"verifying version {manifest.version}", detail)
        return manifest.hash

    async def verify_probe(self, manifest: Manifest) -> float | None:
        """Check that the engine computes as the trainer does: also what is no weight, and weights left out by
        `Engine.checksums`.

        Returns the mean difference of logprobs. Cannot detect weights whose logprobs differ by less than the tolerance.
        """
        if manifest.probe is None:
            return None
        difference = manifest.probe.difference(await self._engine.score(manifest.probe.token_ids))
        if not difference <= self._tolerance:
            before = self.acknowledgement
            raise WeightsMismatch(
                self.name,
                f"verifying version {manifest.version}",
                f"its logprobs differ by {difference:.4g} on average from the trainer's own of version "
                f"{manifest.version}, {self._tolerance:g} is tolerated; before the "
                f"change it held {'no version' if before is None else f'version {before.version}'}",
            )
        return difference

    async def stop(self, why: WorkerError) -> None:
        """End every request with an error."""
        self.failure = why
        await self._engine.close()

    def open_gate(self) -> None:
        self._gate_open, self.is_loading = True, False


def _first(names: Sequence[str]) -> str:
    """The first names, and how many there are: `a, b, c and 7 more of 10 tensors`."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} ({len(names)} tensors)"


def _kind(base: str | None) -> str:
    return "whole weights" if base is None else f"an adapter of the base {base}"
