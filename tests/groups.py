"""Groups made by hand, for tests that need no rollout."""

from __future__ import annotations

from collections.abc import Sequence

from rlsys.types import (
    OK,
    Acknowledged,
    EpisodeMeta,
    Group,
    Outcome,
    SampleMeta,
    TrajectoryMeta,
    VersionSpan,
)


def episode(reward: float | None, outcome: Outcome = OK, num_trained: int = 3) -> EpisodeMeta:
    """One agent, one turn of `num_trained` tokens."""
    sample = SampleMeta(num_prompt=2, num_completion=num_trained, num_trained=num_trained, prompt_key=0)
    return EpisodeMeta((TrajectoryMeta("policy", None, outcome, reward, (sample,)),))


def group(
    serial: int,
    *,
    versions: Sequence[int] = (0,),
    hashes: Sequence[str] | None = None,
    episodes: Sequence[EpisodeMeta] | None = None,
) -> Group:
    """A group with three tokens of each of `versions`, acknowledged as `hashes` (by default `hash-of-VERSION`)."""
    hashes = hashes if hashes is not None else [f"hash-of-{v}" for v in versions]
    return Group(
        serial=serial,
        task_id=f"task-{serial}",
        permit_version=versions[0],
        replica="rollout-0",
        episodes=tuple(episodes or [episode(1.0), episode(0.0)]),
        versions=tuple(VersionSpan(v, 3) for v in versions),
        weights=tuple(Acknowledged("rollout-0", v, h) for v, h in zip(versions, hashes, strict=False)),
        payload=None,
    )
