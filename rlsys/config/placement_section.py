"""Section `placement`: which workers share devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from rlsys.config.section import Section

Sharing = Literal["actor", "rollout", "critic", "reference"]
"""A role whose workers can share devices with those of others."""


def _check_named_once(roles: tuple[Sharing, ...]) -> tuple[Sharing, ...]:
    if len(set(roles)) < len(roles):
        raise ValueError("should name each role once")
    return roles


class PlacementSection(Section):
    """Devices that workers share."""

    together: Annotated[tuple[Sharing, ...], AfterValidator(_check_named_once)] = ()
    """Roles that share devices in turns, at least `actor` and `rollout`: one computes while the others sleep in the
    memory of the host, so that one GPU is enough. Rank i of `actor` and `critic`, replica i, and evaluating replica i
    are on one device, the `reference` on the first; on CPUs, replicas may be more than ranks. Roles that the run does
    not have are passed over. None: each worker has devices of its own."""
