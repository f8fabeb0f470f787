"""A fake pool of replicas that several policies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlsys.batch.samples import meta_of, versions_of
from rlsys.contracts import Busy, RolledOut
from rlsys.testing.pools import FakeRollouts, Fault, now
from rlsys.testing.world import FakeWorld
from rlsys.types import (
    POLICY,
    Acknowledged,
    Assignment,
    Episode,
    Group,
    PolicyVersion,
    ReplicaLoad,
    Trajectory,
    Turn,
    VersionSpan,
)


class FakeJointRollouts(FakeRollouts):
    """Implements `SharedRollouts`: two episodes in which every policy says three tokens. A policy's weights change only
    where a group asks for newer ones, and then to whatever version its relay holds. The first policy speaks for the
    root, the others for subagents with a reward of their own. Latencies and faults are those of the first policy's
    world."""

    def __init__(
        self,
        worlds: Mapping[str, FakeWorld],
        speaks: Callable[[str, int], bool] = lambda policy, serial: True,
    ) -> None:
        """`speaks(policy, serial)`: does it say anything in this group? The first one always does."""
        self.worlds, self.speaks = worlds, speaks
        self._root, *_ = worlds
        super().__init__(worlds[self._root])
        self.assignments: list[Assignment] = []
        """All that were rolled out, in order."""
        self.held: dict[str, PolicyVersion] = dict.fromkeys(worlds, -1)
        """What each policy speaks with."""

    async def run(self, assignment: Assignment) -> RolledOut:
        self.assignments.append(assignment)
        for name, world in self.worlds.items():
            if self.held[name] < (asked := assignment.version_of(name)):
                self.held[name] = await world.held(asked)
        held = dict(self.held)
        start_s = now()
        worker, fault = await self._call("rolling out", assignment.serial, self.world.rollout_s(assignment.serial))
        episodes = tuple(self._episode(assignment, e, held) for e in range(assignment.size))
        wrong = "wrong-" if fault is Fault.WRONG_WEIGHTS else ""
        first, *others = (
            self._view(name, assignment, episodes, Acknowledged(worker, held[name], wrong + world.hash(held[name])))
            for name, world in self.worlds.items()
        )
        return RolledOut(first, Busy(worker, start_s, now()), others=tuple(others))

    async def versions(self, policy: str = POLICY) -> Sequence[Acknowledged]:
        world, held = self.worlds[policy], self.held[policy]
        return [Acknowledged(m, held, world.hash(held)) for m in self.members]

    async def loads(self, policy: str = POLICY) -> Sequence[ReplicaLoad]:
        return [replace(load, version=self.held[policy]) for load in await super().loads()]

    def _view(self, policy: str, assignment: Assignment, episodes: tuple[Episode, ...], weights: Acknowledged) -> Group:
        return Group(
            serial=assignment.serial,
            task_id=assignment.task.id,
            permit_version=assignment.version_of(policy),
            replica=weights.replica,
            episodes=meta_of(episodes),
            versions=versions_of(episodes, policy),
            weights=(weights,),
            payload=episodes,
            policy=policy,
        )

    def _episode(self, assignment: Assignment, index: int, held: Mapping[str, PolicyVersion]) -> Episode:
        speakers = [name for name in held if name == self._root or self.speaks(name, assignment.serial)]
        said = [self._trajectory(name, assignment.serial, index, held[name]) for name in speakers]
        root, *others = said
        return Episode((replace(root, reward=None), *(replace(other, parent=0) for other in others)))

    def _trajectory(self, policy: str, serial: int, episode: int, version: PolicyVersion) -> Trajectory:
        spans = (VersionSpan(version, 3),)
        turn = Turn((7, serial % 97), (serial % 97, episode, 1), (-0.5, -1.0, -0.25), spans, "stop", f"{policy}!")
        return Trajectory(policy, (turn,), reward=float((serial + episode) % 2), policy=policy)
