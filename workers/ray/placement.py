"""Placement of a run's workers on the nodes of a cluster, as placement groups of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlsys.config.placement_plan import NodeRoom, PlacementPlan, Role
from rlsys.config.resource_plan import role_of_policy
from rlsys.errors import ConfigError
from rlsys.types import POLICY

RESERVED_S = 2.0
"""Seconds that other workers are not started until the places of trainers are reserved, if the nodes have them."""


@dataclass(frozen=True, slots=True, eq=False)
class ReservedBundle:
    """Bundle of a placement group, for one worker or several. If its node is lost, Ray reserves it on another."""

    group: PlacementGroup
    index: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Scheduling strategy of an actor that is placed in it."""
        return PlacementGroupSchedulingStrategy(self.group, self.index)

    def is_reserved(self) -> bool:
        """True once a node has reserved it, so that its workers lack nothing. Asks Ray's head."""
        return placement_group_table(self.group)["state"] == "CREATED"


Places: TypeAlias = Callable[[int], ReservedBundle | None]
"""Takes the place of a worker among its like; returns its bundle, or None if Ray places it alone."""


def anywhere(index: int) -> None:
    """Return no bundle: for workers of which none shares a node or a device by plan."""


class Reservations:
    """Reservation of what a run's trainers need, and of what shares their devices."""

    def __init__(self, plan: PlacementPlan) -> None:
        """Reserve one team after the other, in order. Waits a moment for each: those that come first could take a node
        that is the only one for others."""
        self._plan = plan
        self._groups: list[PlacementGroup] = []
        end_s = time.monotonic() + RESERVED_S
        for strategy, team in plan.teams:
            bundles = [plan.bundles[i] for i in team]
            group = placement_group(
                [{"CPU": bundle.num_cpus, "GPU": bundle.num_gpus} for bundle in bundles],
                strategy,
                bundle_label_selector=[dict(bundle.role.labels) for bundle in bundles],
            )
            group.wait(max(0.0, end_s - time.monotonic()))
            self._groups.append(group)

    @classmethod
    def of(cls, roles: Sequence[Role]) -> Self:
        """Reserve the places of a run in the cluster that this process has joined."""
        return cls(PlacementPlan.of(roles, live_nodes()))

    def of_role(self, role: str, policy: str = POLICY) -> Places:
        """Return what gives the bundle of each worker of a role; the roles of learning are those of a policy."""
        name = role_of_policy(role, policy)

        def place(index: int) -> ReservedBundle | None:
            found = self._plan.team_of(name, index)
            return found and ReservedBundle(self._groups[found[0]], found[1])

        return place

    def close(self) -> None:
        """Give everything back; workers that are there still are killed."""
        for group in self._groups:
            remove_placement_group(group)


def live_nodes() -> list[NodeRoom]:
    """Nodes of the cluster that this process has joined."""
    nodes = [(node["NodeManagerAddress"], node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]
    return [NodeRoom(address, has.get("CPU", 0.0), has.get("GPU", 0.0), labels) for address, has, labels in nodes]


def check_fits(roles: Sequence[Role], nodes: Sequence[NodeRoom]) -> None:
    """Raise `ConfigError` if the cluster can never place the run, instead of waiting for ever: its nodes have too
    little together, or none has enough for what belongs on one node."""
    plan = PlacementPlan.of(roles, nodes)
    needs = sum(bundle.num_cpus for bundle in plan.bundles), sum(bundle.num_gpus for bundle in plan.bundles)
    have = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
    problems = [
        f"the run needs {needed:g} {name}s and the cluster has {found:g}: lower {name.lower()}s (resources), replicas, "
        "ranks or workers, or raise ray of a local cluster"
        for name, needed, found in zip(("CPU", "GPU"), needs, have, strict=True)
        if needed > found
    ]
    problems += plan.problems(nodes, is_short=bool(problems))
    if problems and len(nodes) > 1:
        problems += [f"  {node}" for node in nodes]
    if problems:
        raise ConfigError("\n".join(problems))
