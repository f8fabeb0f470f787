"""Placement of a run's workers: which of them share a node or a device, computed before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Strategy: TypeAlias = Literal["PACK", "SPREAD"]
"""On few nodes, or on many, where there is a choice."""
EPSILON = 1e-9
"""Part of a CPU or GPU that sums of parts may be wrong by."""
MOST_TRIES = 20_000
"""Bundles that are tried on a node before the search ends without an answer."""


@dataclass(frozen=True, slots=True)
class Role:
    """Workers of one kind, with the resources that Ray reserves for each."""

    name: str
    count: int
    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""
    block: int = 0
    """Ranks, in order, that belong on one node; 0: its workers are no ranks, and are placed one by one."""
    num_copies: int = 1
    """Copies of the model that its ranks hold together."""
    is_shared: bool = False
    """True if worker i has its devices in turns with worker i of other roles; its resources are then a part."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """Resources of one node, taken or not."""

    address: str
    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        labels = "".join(f", {key}={value}" for key, value in sorted(self.labels.items()) if "/" not in key)
        return f"{self.address}: {self.num_cpus:g} CPUs, {self.num_gpus:g} GPUs{labels}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one node that are reserved for one worker, or for several that belong together."""

    role: Role
    """Role of the workers that it was made for."""
    count: int
    """Number of these workers."""
    num_cpus: float
    num_gpus: float
    free: float = 0.0
    """Part of its GPU that no worker has yet."""

    @property
    def is_empty(self) -> bool:
        """True if it reserves nothing."""
        return not (self.num_cpus or self.num_gpus)

    @property
    def text(self) -> str:
        """Words for an error, up to the resources."""
        if self.count == 1:
            return f"a worker of the role {self.role.name} needs {_resources(self.num_cpus, self.num_gpus)}"
        each = f"{self.count} workers of the role {self.role.name}, which belong on one node,"
        return f"{each} need {_resources(self.num_cpus, self.num_gpus)}"

    def fits_on(self, node: NodeRoom) -> bool:
        """True if it fits on the node when nothing else is there."""
        is_there = all(node.labels.get(key) == value for key, value in self.role.labels.items())
        return is_there and self.num_cpus <= node.num_cpus and self.num_gpus <= node.num_gpus


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Bundles of a run, and the bundle of each worker.

    The ranks of a trainer are reserved as one: they wait for each other. Ranks that differ only in `tensor` or
    `context` share a bundle; with copies (`replicate`) that fit on a node, all ranks of a copy do. Ranks with a part
    of a GPU have a GPU each, because two of them cannot talk to each other on one; other workers that ask for a part
    have the rest of these. Workers that have devices in turns are where the rank of the same number is. Workers that
    need labels are reserved too, and first, so that no others take their nodes. All other workers are placed one by
    one.
    """

    bundles: tuple[Bundle, ...]
    teams: tuple[tuple[Strategy, range], ...]
    """Bundles that are reserved as one."""
    places: Mapping[tuple[str, int], int]
    """Bundle of each worker, by name of its role and its place among them."""

    @classmethod
    def of(cls, roles: Sequence[Role], nodes: Sequence[NodeRoom]) -> PlacementPlan:
        """Plan for these roles, on a cluster of these nodes; how full they are does not matter."""
        bundles: list[Bundle] = []
        teams: list[tuple[Strategy, range]] = []
        places: dict[tuple[str, int], int] = {}
        shared: list[int] = []
        """Bundle of each rank whose devices are shared."""
        for role in (role for role in roles if role.block):  # first: the others have what these leave of their GPUs
            of_ranks = _share_bundles(bundles, role, shared) if role.is_shared else _rests(bundles, role, role.count)
            if not of_ranks:
                strategy, new = _own_bundles(role, nodes)
                team = range(len(bundles), len(bundles) + len(new))
                bundles += new
                teams.append((strategy, team))
                of_ranks = [bundle for bundle in team for _ in range(bundles[bundle].count)]
                shared = of_ranks if role.is_shared else shared
            places |= {(role.name, rank): bundle for rank, bundle in enumerate(of_ranks)}
        for role in (role for role in roles if not role.block):
            first = len(bundles)
            joined = _share_bundles(bundles, role, shared) if role.is_shared else []
            for i in range(role.count):
                rest = [joined[i]] if joined else _rests(bundles, role, 1)
                places[role.name, i] = rest[0] if rest else len(bundles)
                if not rest:
                    bundles.append(_bundle(role, 1))
            if role.labels and len(bundles) > first:
                teams.append(("SPREAD", range(first, len(bundles))))
        teams = [team for team in teams if not bundles[team[1].start].is_empty]
        teams.sort(key=lambda team: not bundles[team[1].start].role.labels)
        return cls(tuple(bundles), tuple(teams), places)

    def team_of(self, role: str, index: int) -> tuple[int, int] | None:
        """Return the team in which a worker is placed, and its bundle there; None for one that is placed alone."""
        bundle = self.places.get((role, index), -1)  # none for a replica that joined later
        found = ((i, bundle - team.start) for i, (_, team) in enumerate(self.teams) if bundle in team)
        return next(found, None)

    def problems(self, nodes: Sequence[NodeRoom], *, is_short: bool) -> Iterator[str]:
        """Reasons why a cluster of these nodes can never hold the run, in words; `is_short` is True if they have too
        little together, which is no reason of these."""
        homeless = {bundle.text: bundle for bundle in self.bundles if not any(map(bundle.fits_on, nodes))}
        for text, bundle in homeless.items():
            labels = ", ".join(f"{key}={value}" for key, value in bundle.role.labels.items())
            where = f"no node with {labels}" if labels else "no node"
            remedy = "cpus, gpus or labels (resources)" if labels else "cpus or gpus (resources)"
            yield f"{text}, and {where} has them: change {remedy}" + (
                ", or tensor and context (train.mesh)" if bundle.count > 1 else ""
            )
        if not homeless and not is_short and not can_hold(self.bundles, nodes):
            yield (
                "the nodes have enough together, but not so that each worker's part is on one of them: change cpus, "
                "gpus (resources), replicas, workers or train.mesh"
            )


def _own_bundles(role: Role, nodes: Sequence[NodeRoom]) -> tuple[Strategy, list[Bundle]]:
    """Return the bundles of ranks that share none with another role, and where to place them."""
    if role.block and 0 < role.num_gpus < 1:
        return "PACK", [Bundle(role, 1, role.num_cpus, 1.0, 1.0 - role.num_gpus)] * role.count
    copy = role.count // role.num_copies
    if role.num_copies > 1 and any(map(_bundle(role, copy).fits_on, nodes)):
        return "SPREAD", [_bundle(role, copy)] * role.num_copies
    return "PACK", [_bundle(role, role.block)] * (role.count // role.block)


def _bundle(role: Role, count: int) -> Bundle:
    return Bundle(role, count, count * role.num_cpus, count * role.num_gpus)


def _share_bundles(bundles: list[Bundle], role: Role, shared: Sequence[int]) -> list[int]:
    """Let worker i of a role share the bundle of rank i, or begin with the first again; return these bundles, and none
    without such ranks."""
    of_workers = [shared[i % len(shared)] for i in range(role.count)] if shared else []
    for i in of_workers:
        old = bundles[i]
        bundles[i] = replace(old, num_cpus=old.num_cpus + role.num_cpus, free=old.free - role.num_gpus)
    return of_workers


def _rests(bundles: list[Bundle], role: Role, count: int) -> list[int]:
    """Give so many workers of a role the rest of a GPU each, the largest first; return their bundles. Gives none, and
    returns none, if the role asks for no part of a GPU, or too few have it."""
    able = [i for i, b in enumerate(bundles) if b.free >= role.num_gpus - EPSILON and b.role.labels == role.labels]
    if not 0 < role.num_gpus < 1 or len(able) < count:
        return []
    chosen = sorted(sorted(able, key=lambda i: -bundles[i].free)[:count])
    for i in chosen:
        old = bundles[i]
        bundles[i] = replace(old, num_cpus=old.num_cpus + role.num_cpus, free=old.free - role.num_gpus)
    return chosen


@dataclass
class _Remainder:
    """Resources that a node has left."""

    num_cpus: float
    num_gpus: float
    rests: tuple[float, ...] = ()
    """Rests of GPUs of which a part is taken."""

    def without(self, bundle: Bundle) -> _Remainder | None:
        """Return the node with this bundle on it; None if it has no room."""
        left = self.num_cpus - bundle.num_cpus
        if left < -EPSILON:
            return None
        if bundle.num_gpus >= 1 or not bundle.num_gpus:
            has_room = bundle.num_gpus <= self.num_gpus
            return _Remainder(left, self.num_gpus - bundle.num_gpus, self.rests) if has_room else None
        able = sorted(rest for rest in self.rests if rest >= bundle.num_gpus - EPSILON)
        if able:
            others = list(self.rests)
            others.remove(able[0])
            return _Remainder(left, self.num_gpus, (*others, able[0] - bundle.num_gpus))
        return _Remainder(left, self.num_gpus - 1, (*self.rests, 1 - bundle.num_gpus)) if self.num_gpus >= 1 else None


def can_hold(bundles: Sequence[Bundle], nodes: Sequence[NodeRoom]) -> bool:
    """Return False if these bundles certainly cannot all be on these nodes at once. A search that takes long ends with
    True: then the cluster decides."""
    order = sorted(bundles, key=lambda bundle: (-bundle.num_gpus, -bundle.num_cpus, bundle.role.name))
    state = [_Remainder(node.num_cpus, node.num_gpus) for node in nodes]
    tries = 0
    stack: list[tuple[int, _Remainder]] = []
    """Node of each placed bundle, and what it had left before."""
    first = 0
    while len(stack) < len(order):
        bundle = order[len(stack)]
        found = None
        for i in range(first, len(nodes)):
            tries += 1
            if bundle.fits_on(nodes[i]) and (after := state[i].without(bundle)) is not None:
                found = i, after
                break
        if tries > MOST_TRIES:
            return True
        if found is not None:
            i, after = found
            stack.append((i, state[i]))
            state[i] = after
            is_alike = len(stack) < len(order) and order[len(stack)] == bundle
            first = i if is_alike else 0  # bundles that are alike are on nodes in order: no arrangement is tried twice
        elif stack:
            i, before = stack.pop()
            state[i] = before
            first = i + 1
        else:
            return False
    return True


def _resources(num_cpus: float, num_gpus: float) -> str:
    return f"{num_cpus:g} CPUs and {num_gpus:g} GPUs"
