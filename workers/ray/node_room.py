"""Room of each node of a cluster, and the check that the workers of a run fit, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray

from rlsys.config.resource_plan import Role, needs
from rlsys.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """Resources of one node, taken or not."""

    address: str
    num_cpus: float
    num_gpus: float

    def has_room_for(self, role: Role) -> bool:
        """True if a worker of this role fits on the node when nothing else is there."""
        return role.num_cpus <= self.num_cpus and role.num_gpus <= self.num_gpus


def live_nodes() -> list[NodeRoom]:
    """Nodes of the cluster that this process has joined."""
    nodes = [(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return [NodeRoom(address, has.get("CPU", 0.0), has.get("GPU", 0.0)) for address, has in nodes]


def check_fits(roles: Sequence[Role], nodes: Sequence[NodeRoom]) -> None:
    """Raise `ConfigError` if the cluster can never place the run, instead of waiting for ever: its nodes have too
    little together, or none has enough for one worker of some role."""
    have = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
    problems = [
        f"the run needs {needed:g} {name}s and the cluster has {found:g}: lower {name.lower()}s (resources), replicas, "
        "ranks or workers, or raise ray of a local cluster"
        for name, needed, found in zip(("CPU", "GPU"), needs(roles), have, strict=True)
        if needed > found
    ]
    problems += [
        f"a worker of the role {role.name} needs {role.num_cpus:g} CPUs and {role.num_gpus:g} GPUs, and no node has "
        "them: lower cpus or gpus (resources)"
        for role in roles
        if role.count and not any(node.has_room_for(role) for node in nodes)
    ]
    if problems and len(nodes) > 1:
        problems += [f"  {node.address}: {node.num_cpus:g} CPUs, {node.num_gpus:g} GPUs" for node in nodes]
    if problems:
        raise ConfigError("\n".join(problems))
