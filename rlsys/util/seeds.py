"""Seeds of all randomness: each is a pure function of the run's seed and of *what* is sampled.

No generator with a state is used. So a seed depends neither on the order of events nor on the replica that samples, and
a resume restores nothing. Seeds have 63 bits, to fit a signed 64-bit integer.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

_63_BITS = (1 << 63) - 1
_64_BITS = (1 << 64) - 1


def group_seed(run_seed: int, group_id: int) -> int:
    """Return the sampling seed of the group `group_id` of a run."""
    return _mix_seed(b"group", run_seed, group_id)


def request_seed(group_seed: int, episode: int, number: int, *path: int) -> int:
    """Return the seed of the n-th policy call of one agent of an episode; `path` is the agent's, see `Agent.path`."""
    return _mix_seed(b"request", group_seed, episode, number, *path)


def environment_seed(group_seed: int, number: int, *path: int) -> int:
    """Return the seed of the n-th environment of an agent, equal for all episodes of a group. `path` is the agent's,
    see `Agent.path`."""
    return _mix_seed(b"world", group_seed, number, *path)


def continuation_seed(request_seed: int, position: int) -> int:
    """Return the seed of a completion's rest, from token `position`, if its generator's state was not kept."""
    return _mix_seed(b"continue", request_seed, position)


def epoch_seed(run_seed: int, epoch: int) -> int:
    """Return the seed of the order of tasks in one epoch."""
    return _mix_seed(b"epoch", run_seed, epoch)


def _mix_seed(purpose: bytes, *numbers: int) -> int:
    """Return XXH3 of integers and a purpose, so that seeds for different purposes never coincide by construction."""
    packed = struct.pack(f"<8s{len(numbers)}Q", purpose, *(n & _64_BITS for n in numbers))
    return xxh3_64_intdigest(packed) & _63_BITS
