"""Damaged input, from a seed: configurations, data files, requests to the gateway and run folders.

    python -m benchmarks.damage [--count 1000 | --short] [--seed 0] [--kinds configs rows gateway folders]

Each input is damaged as in the tests of the same kind (`tests/damage.py`), and given to what reads it: the command
line, the gateway, the dashboard, the report, `rlsys tail`, `export` and `replay`. A refusal in words is as good as an
answer. Any other exception counts in `tracebacks`, and is shown on stderr with its seed; an input that takes longer
than 60 s counts in `hangs`. `gateway` inputs are sent 25 at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random

from benchmarks.measure import ENV, parser_of, print_result, progress
from tests.histories import small_run
from tests.unit.agents.test_gateway_damage import REQUESTS_PER_CASE, ask_damaged
from tests.unit.config.test_config_damage import use_damaged, valid_configurations
from tests.unit.dashboard.test_dashboard_damage import read_damaged
from tests.unit.data.test_row_damage import describe_damaged

KINDS = ("configs", "rows", "gateway", "folders")
HANG_S = 60.0


class Hang(BaseException):
    """An input took too long."""


def main() -> None:
    """Entry point of the command."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    count = 5 if given.size == "short" else given.count
    os.environ.update(ENV)  # a damaged name of a model is looked up in no hub
    signal.signal(signal.SIGALRM, _hang)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        uses = uses_in(Path(folder))
        for kind in given.kinds:
            each = REQUESTS_PER_CASE if kind == "gateway" else 1
            figures[kind] = tried(kind, uses[kind], -(-count // each), given.seed) | {"count": -(-count // each) * each}
    print_result(figures)


def uses_in(folder: Path) -> dict[str, Callable[[Random], None]]:
    """Functions that damage and use one input of each kind."""
    (folder / "valid").mkdir()
    configurations, whole = valid_configurations(folder / "valid"), small_run(folder / "whole" / "run")

    def read_run(random: Random) -> None:
        try:
            read_damaged(whole, folder / "damaged", random)
        finally:
            shutil.rmtree(folder / "damaged", ignore_errors=True)

    return {
        "configs": lambda random: use_damaged(configurations, folder, random),
        "rows": lambda random: describe_damaged(folder, random),
        "gateway": lambda random: ask_damaged(random, REQUESTS_PER_CASE),
        "folders": read_run,
    }


def tried(kind: str, use: Callable[[Random], None], num: int, seed: int) -> dict[str, int]:
    """Use `num` inputs, each from a seed of its own; count what may not happen."""
    found = Counter(tracebacks=0, hangs=0)
    for i in range(num):
        own_seed = f"{seed}/{kind}/{i}"
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                use(Random(own_seed))
        except Hang:
            found["hangs"] += 1
            progress(f"{own_seed} hangs")
        except Exception:  # noqa: BLE001  (it is counted and shown)
            found["tracebacks"] += 1
            progress(f"{own_seed}\n{traceback.format_exc()}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if i % 100 == 99:
            progress(f"{kind}: {i + 1} of {num}, {dict(found)}")
    return dict(found)


def _hang(number: int, frame: object) -> None:
    raise Hang


if __name__ == "__main__":
    main()
