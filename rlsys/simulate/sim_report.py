"""Report of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """Means over the measured steps, after the pipe was full."""

    steps: int
    measured: int
    """Number of measured steps: the last ones, to which all figures below refer."""
    tokens_per_s: float
    """Trained tokens per second."""
    samples_per_s: float
    generated_tokens_per_s: float
    """Sampled tokens per second, over all replicas."""
    step_s: float
    train_s: float
    """Compute time of the trainer per step, in seconds."""
    rollouts_idle: float
    """Share of the replicas' time without a running request."""
    trainer_idle: float
    """Share of the trainer's time without computation."""
    weights_exposed_s: float
    """Seconds per step that a replica was halted for weights, mean over replicas."""
    publish_stall_s: float
    """Seconds per step that the trainer was halted by a publish."""
    broadcast_s: float
    """Mean seconds until a version reached every relay."""
    kv_used: float
    """Mean share of the cache in use, over the time with a running request."""
    cached_share: float
    """Share of the context that was cached when a request began."""
    environments_busy: float
    """Mean number of working environments; one that waits for its next turn does not count."""
    moved_groups: float
    """Groups moved by repacking, per step."""
    staleness: Mapping[str, float]
    """Share of the trained tokens, by staleness."""
    staleness_max: int
    staleness_bound: int
    dropped: int
    """Groups dropped since the simulation began."""
    wall_s: float
    """Wall time of the simulation itself, in seconds; not part of its outcome."""

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of a trained token."""
        return sum(int(versions) * share for versions, share in self.staleness.items())

    def as_json(self) -> dict[str, Any]:
        """Convert to a line of JSON: equal for equal profiles, so without `wall_s`."""
        found = {key: value for key, value in asdict(self).items() if key != "wall_s"}
        return {**found, "staleness_mean": self.staleness_mean}
