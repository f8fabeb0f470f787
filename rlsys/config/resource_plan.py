"""Resources and pace of a configuration, computed before anything starts: `rlsys plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Literal

from rlsys.algorithm import Column
from rlsys.config.placement_plan import PlacementPlan, Role
from rlsys.config.run_sections import WorkerRole
from rlsys.config.schema import Config
from rlsys.types import POLICY


@dataclass(frozen=True, slots=True)
class Plan:
    """Figures derived from a configuration."""

    run_dir: str
    steps: int
    samples_per_step: int
    """Episodes of one step."""
    permits: int
    """Most groups in the pipe at once."""
    max_staleness: int
    """Most steps between sampling a token and training it."""
    num_cpus: float
    """CPUs that Ray reserves, over all workers."""
    num_gpus: float
    roles: tuple[Role, ...]
    caution: str = ""
    """Cost of this staleness with this algorithm; empty if there is none."""
    policies: tuple[tuple[str, Plan | None], ...] = ()
    """Name and plan of each of several policies; None if frozen. The figures above then belong to no policy."""

    def lines(self) -> Iterator[str]:
        """Plan as text, one fact a line."""
        yield f"run directory {self.run_dir}"
        for name, plan in self.policies:
            yield f"policy {name}: " + ("frozen" if plan is None else ", ".join(plan.pace()))
        if not self.policies:
            yield from self.pace()
        yield f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs reserved:"
        for role in self.roles:
            shared = ", on shared devices" if role.is_shared else ""
            yield f"  {role.count} x {role.name}: {role.num_cpus:g} CPUs, {role.num_gpus:g} GPUs each{shared}"

    def pace(self) -> Iterator[str]:
        """Lines on the training batch and the staleness bound."""
        yield (f"{self.steps} " if self.steps else "") + f"steps of {self.samples_per_step} samples"
        yield f"{self.permits} groups in the pipe at most, so no token is more than {self.max_staleness} steps stale"
        if self.caution:
            yield f"caution: {self.caution}"


def plan_of(config: Config) -> Plan:
    """Compute the plan of a configuration."""
    roles = tuple(_roles(config))
    trained = config.trained_policies
    num_cpus, num_gpus = needs(roles)
    return Plan(
        run_dir=str(config.run_dir),
        steps=config.run.steps,
        samples_per_step=config.samples_per_step,
        permits=config.permits,
        max_staleness=config.staleness_bound,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        roles=roles,
        caution=config.staleness_caution,
        policies=tuple((name, plan_of(trained[name]) if name in trained else None) for name in config.policies),
    )


def evaluation_roles(config: Config) -> tuple[Role, ...]:
    """Workers of `rlsys eval`, which trains nothing."""
    return (_evaluation(config), _reward(config)) if config.reward.workers else (_evaluation(config),)


def needs(roles: Sequence[Role]) -> tuple[float, float]:
    """CPUs and GPUs that Ray reserves for all roles. A rank with a part of a GPU takes it whole."""
    bundles = PlacementPlan.of(roles, ()).bundles
    return sum(bundle.num_cpus for bundle in bundles), sum(bundle.num_gpus for bundle in bundles)


def _roles(config: Config) -> Iterator[Role]:
    yield _role(config, "rollout", config.rollout.replicas)
    if config.reward.workers:
        yield _reward(config)
    if not config.policies:
        yield from _learning(config)
    for name, own in config.trained_policies.items():
        yield from (replace(role, name=role_of_policy(role.name, name)) for role in _learning(own))
    if config.eval.every:
        yield _evaluation(config)


def role_of_policy(role: str, policy: str) -> str:
    """Return the name of the role that trains `policy`, one of several; of `POLICY`, the only one, it is `role`."""
    return role if policy == POLICY else f"{role} of {policy}"


def _learning(config: Config) -> Iterator[Role]:
    yield _ranks(config, "actor")
    if config.has_reference:
        yield _role(config, "reference", 1)
    if Column.VALUES in config.algorithm.columns:
        yield _ranks(config, "critic")


def _ranks(config: Config, role: Literal["actor", "critic"]) -> Role:
    mesh = config.train.mesh
    ranks = _role(config, role, mesh.num_ranks, f"{role} rank")
    return replace(ranks, block=mesh.num_peers, num_copies=mesh.replicate)


def _evaluation(config: Config) -> Role:
    return _role(config, "rollout", config.eval.replicas, "evaluation")


def _reward(config: Config) -> Role:
    return _role(config, "reward", config.reward.workers)


def _role(config: Config, role: WorkerRole, count: int, name: str = "") -> Role:
    own, shares = config.resources[role], shares_of(config, role)
    num_cpus, num_gpus = part_of(own.cpus, shares), part_of(own.num_gpus, shares)
    return Role(name or role, count, num_cpus, num_gpus, own.labels, is_shared=shares > 1)


def shares_of(config: Config, role: WorkerRole) -> int:
    """Return the number of roles that share the devices of this one, itself included."""
    return len(config.tenants) if role in config.tenants else 1


def part_of(amount: float, shares: int) -> float:
    """Return what Ray reserves for one of so many workers that have the whole in turns: it counts 1/10,000.

    >>> part_of(1.0, 3), part_of(2.0, 1)
    (0.3333, 2.0)
    """
    return amount if shares == 1 else floor(amount / shares * 10_000) / 10_000
