"""Random schedules with faults on the virtual clock, checked for the staleness bound, one training per task, no reissue
of healthy groups, and an exact number of permits.

    python -m benchmarks.schedules [--count 10000 | --short]

Each schedule draws latencies with long tails, limits, ways of changing weights, interruptions, and faults of rollouts,
reward workers, relays and payloads; see `tests/simulate/schedules.py`. Prints one JSON object; exits with 1 and the
seed if a schedule violates a guarantee.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from multiprocessing import Pool

from benchmarks.measure import parser_of, print_result
from tests.simulate.schedules import played


def main() -> int:
    """Play all schedules."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="schedules, of seeds 0, 1, ...")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    count = 40 if options.size == "short" else options.count
    began = time.monotonic()
    with Pool(options.processes) as pool:
        outcomes = pool.map(played, range(count), chunksize=50)
    broken = {
        "bound_exceeded": [seed for seed, o in enumerate(outcomes) if o.staleness > o.bound],
        "not_exactly_once": [seed for seed, o in enumerate(outcomes) if not o.is_exactly_once],
        "stale_while_calibrating": [seed for seed, o in enumerate(outcomes) if not o.is_calibrated],
        "dropped_stale": [seed for seed, o in enumerate(outcomes) if o.num_stale],
        "issued_again_for_nothing": [seed for seed, o in enumerate(outcomes) if o.num_healthy],
        "permits_miscounted": [seed for seed, o in enumerate(outcomes) if not o.has_all_permits],
    }
    largest: dict[str, dict[str, int]] = defaultdict(dict)
    for o in sorted(outcomes, key=lambda o: (o.max_staleness, o.bound, o.staleness)):
        largest[f"max_staleness={o.max_staleness}"][f"bound={o.bound}"] = o.staleness
    print_result(
        {
            "schedules": count,
            "seconds": round(time.monotonic() - began, 1),
            "broken": broken,
            "groups_issued_again": sum(o.num_reissued for o in outcomes),
            "largest_staleness": largest,
        }
    )
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
