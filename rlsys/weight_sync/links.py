"""Links between relays: their speed, how long a broadcast over them takes, and the shape that is the fastest."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_S = 1.25e9
"""Speed of a link that was not measured: 10 Gbit/s Ethernet."""
HOP_S = 5e-3
"""Fixed cost of passing a bucket on: a call to the relay before, a transfer and a put. See `benchmarks.relay`."""
WEIGHT = 0.2
"""Weight of a new measurement against those before."""
TRANSFER_S = 120.0
"""Least deadline of one weight transfer, seconds. A single relay must answer within a quarter of it; otherwise it is
killed and filled again."""
SLACK = 10.0
"""Times that a transfer may take what its bytes take at the measured speed, before it counts as failed."""


@dataclass(frozen=True, slots=True)
class Link:
    """Speed at which a relay receives buckets."""

    bytes_per_s: float = BYTES_PER_S
    hop_s: float = HOP_S
    is_measured: bool = False

    def after(self, num_bytes: int, seconds: float) -> Link:
        """Return the link with one more measurement: a bucket of `num_bytes` that took `seconds` of the link.

        The mean is of seconds per byte, so that buckets that share the link and arrive together count as they should:
        the first took the seconds of all, the others none.
        """
        pace = max(seconds, 1e-9) / num_bytes
        old = 1 / self.bytes_per_s
        mean = old + WEIGHT * (pace - old) if self.is_measured else pace
        return Link(1 / mean, self.hop_s, is_measured=True)


def deadline_s(least_s: float, num_bytes: int, bytes_per_s: float) -> float:
    """Deadline of a transfer of `num_bytes` over links that were measured at `bytes_per_s`.

    With `TRANSFER_S` of 120 s and 10 Gbit/s: 122 s for 270 MB, 20 minutes for the 140 GB of a model
    with 70 billion parameters.
    """
    return least_s + SLACK * num_bytes / bytes_per_s


def chain_s(num_relays: int, num_bytes: float, num_chunks: int, link: Link) -> float:
    """Seconds until the last of `num_relays` in a chain has `num_bytes`, sent in equal chunks.

    T(k) = (n + k - 1) (M / (k B) + a). A chunk takes M / (k B) + a per hop, `hop_s` being the fixed cost a. The last
    chunk leaves the actor after k such times and has n - 1 hops left. This is the usual model of a pipelined chain;
    Laminar's appendix D (arXiv:2510.12633) analyses the latency of such a chain.
    """
    return (num_relays + num_chunks - 1) * (num_bytes / (num_chunks * link.bytes_per_s) + link.hop_s)


def tree_s(num_relays: int, num_bytes: float, num_chunks: int, link: Link) -> float:
    """Seconds until the last of `num_relays` in a binary tree has `num_bytes`, sent in equal chunks.

    As a chain of the tree's depth, in which each relay sends every chunk twice.
    """
    depth = num_relays.bit_length()
    return (depth + num_chunks - 1) * (2 * num_bytes / (num_chunks * link.bytes_per_s) + link.hop_s)


def parents(num_relays: int, num_bytes: int, num_chunks: int, link: Link) -> list[int]:
    """Return, for each relay, the earlier one that it pulls from: those of a chain, or of a binary tree where that is
    sooner, as for few bytes on many nodes. The first has no other."""
    sizes = (num_relays, num_bytes, max(num_chunks, 1), link)
    if chain_s(*sizes) <= tree_s(*sizes):
        return [max(i - 1, 0) for i in range(num_relays)]
    return [max(i - 1, 0) // 2 for i in range(num_relays)]
