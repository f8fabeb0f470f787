"""Cost of our loss and advantage code against naive code: padded (B, T) matrices with a mask, and a Python loop over
tokens for GAE.

For 32 k and 256 k trained tokens: the loss with its metrics, averaged, and its backward to the logprobs, M2PO's and
KTO's `step_statistics` included; the critic's loss with its backward to the values; advantages of groups; rewards to go
with the KL (REINFORCE++); GAE; whitening. Both sides compute the same, on the same numbers, in turn, in one thread;
figures are medians of CPU time. `difference` is the largest one between the results (gradients by the logprobs;
advantages), over the largest result. Lengths of samples are spread evenly from 1 to twice their mean, so that about
half of a padded matrix is padding.

    python -m benchmarks.losses [--repeats 15 | --short]
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from benchmarks.measure import parser_of, print_result, spread, timed
from tests.padded_losses import SAME, Run, cases, difference, tokens

SIZES = {"32k": (64, 512), "256k": (256, 1024)}
"""Number of samples, and mean trained tokens of each."""
SMALL = {"1k": (32, 32)}


def main() -> None:
    """Print a line per comparison, then all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    is_short = arguments.size == "short"
    repeats = 1 if is_short else arguments.repeats
    torch.set_num_threads(1)
    figures: dict[str, object] = {}
    for name, size in (SMALL if is_short else SIZES).items():
        both = tokens(*size)
        results = {case: compared(*runs, both.mask_BT, repeats) for case, runs in cases(both).items()}
        figures[name] = {"tokens": len(both.logprobs_N), "positions": both.mask_BT.numel(), **results}
        for case, result in results.items():
            print(f"{name:>5} {case:<16} {result['reference_over_ours']:6.2f}x  {result['difference']:.1e}")
    print_result(figures)


def compared(run_ours: Run, run_reference: Run, mask_BT: Tensor, repeats: int) -> dict[str, object]:
    """Measure times in milliseconds; one warm-up each, then in turn. Raises `ValueError` if the results differ."""
    found = difference(run_ours(), run_reference(), mask_BT)
    if not found < SAME:
        raise ValueError(f"ours and the reference differ by {found:.1e} of the largest result")
    own_s: list[float] = []
    reference_s: list[float] = []
    for _ in range(repeats):
        for seconds, run in ((own_s, run_ours), (reference_s, run_reference)):
            with timed(seconds, time.process_time):
                run()
    return {
        "ours_ms": spread([1e3 * s for s in own_s]),
        "reference_ms": spread([1e3 * s for s in reference_s]),
        "reference_over_ours": median(reference_s) / median(own_s),
        "difference": found,
    }


if __name__ == "__main__":
    main()
