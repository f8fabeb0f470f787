"""What a simulation found, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """Means over the steps measured: those after the pipe was full."""

    steps: int
    """Optimizer steps of the simulation."""
    measured: int
    """The last so many of them, which everything below is about."""
    tokens_per_s: float
    """Trained tokens per second."""
    samples_per_s: float
    generated_tokens_per_s: float
    """Sampled tokens per second, over all replicas."""
    step_s: float
    train_s: float
    """Seconds of a step in which the trainer computed."""
    rollouts_idle: float
    """Share of the replicas' time in which nothing was running."""
    trainer_idle: float
    """Share of the trainer's time in which it computed nothing."""
    weights_exposed_s: float
    """Seconds of a step that a replica stood still for weights, mean over replicas."""
    publish_stall_s: float
    """Seconds of a step that the trainer stood still to publish."""
    broadcast_s: float
    """Seconds until every relay held a version, mean."""
    kv_used: float
    """Share of the cache in use, mean over the time in which a replica runs something."""
    cached_share: float
    """Share of the context whose keys and values were in the cache when a request began."""
    environments_busy: float
    """Environments at work, mean over time; one that waits for its next turn is not."""
    moved_groups: float
    """Groups moved in a step, by repacking."""
    staleness: Mapping[str, float]
    """Share of the trained tokens by the versions they were behind."""
    staleness_max: int
    staleness_bound: int
    dropped: int
    """Groups dropped since the simulation began."""
    wall_s: float
    """Seconds the simulation itself took, on the wall clock; not part of its outcome."""

    @property
    def staleness_mean(self) -> float:
        """Versions that a trained token was behind, on average."""
        return sum(int(versions) * share for versions, share in self.staleness.items())

    def as_json(self) -> dict[str, Any]:
        """For a line of JSON: equal for equal profiles, so without what the simulation itself took."""
        found = {key: value for key, value in asdict(self).items() if key != "wall_s"}
        return {**found, "staleness_mean": self.staleness_mean}
