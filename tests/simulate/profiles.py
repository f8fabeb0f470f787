"""Small profiles for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from rlsys.simulate.profile import Profile

SMALL: dict[str, Any] = {
    "gpus": 8,
    "gpus_per_node": 2,
    "inference_share": 0.5,
    "slots": 64,
    "cache_tokens": 100_000,
    "decode": {"overhead_s": 0.005, "weights_s": 0.005, "sequence_s": 0.0001, "token_s": 1e-7},
    "prefill_tokens_per_s": 50_000,
    "groups_per_step": 16,
    "group_size": 4,
    "prompt": {"mean": 50},
    "response": {"mean": 400, "sigma": 1.0, "cap": 3000},
    "max_staleness": 0,
    "train": {"fixed_s": 0.5, "tokens_per_s": 2000},
    "weights": {
        "num_bytes": 1_000_000_000,
        "push_bytes_per_s": 5e9,
        "link_bytes_per_s": 5e9,
        "link_latency_s": 0.001,
        "load_s": 0.2,
    },
    "restart_s": 5.0,
}
"""Four replicas and four GPUs that train; lengths with a tail."""


def small(**changes: Any) -> Profile:
    """`SMALL` with these keys instead; those of a section are merged into it."""
    tree = {key: {**value} if isinstance(value, dict) else value for key, value in SMALL.items()}
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and key in tree else value
    return Profile.model_validate(tree)
