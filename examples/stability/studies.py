"""Studies: the grid of the lab, the algorithms, and the search for settings in which control helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from algorithms.gac import GAC
from examples.stability.lab import ALGORITHMS, BLIND, DEFAULT, UNCAPPED, Run
from rlsys.config.train_section import LrStaleness

CALIBRATED_ON = 20
"""Synchronous steps for the calibration of thresholds."""


@dataclass(frozen=True, slots=True)
class Row:
    """Line of a table: the same run on several seeds."""

    label: str
    """Name of the control."""
    run: Run
    seeds: Sequence[int]

    @property
    def runs(self) -> list[Run]:
        return [replace(self.run, seed=seed) for seed in self.seeds]


ARMS: Mapping[str, GAC] = {
    "off": GAC(),
    "off, synchronous start": GAC(calibrate_steps=CALIBRATED_ON),  # the baseline of a calibrated control
    "on": GAC(enabled=True),
    "calibrated": GAC(enabled=True, calibrate_steps=CALIBRATED_ON),
}


def grid(seeds: Sequence[int], steps: int = 160, staleness: Sequence[int] = (0, 4, 16, 32)) -> list[Row]:
    """Build the rows of staleness x correction x control."""
    return [
        Row(label, Run(staleness=s, algorithm=algorithm, gac=gac, steps=steps), seeds)
        for algorithm in (DEFAULT, BLIND)
        for s in staleness
        for label, gac in ARMS.items()
        if s or label != "off, synchronous start"  # at 0 every step is
    ]


def corrections(seeds: Sequence[int], staleness: Sequence[int] = (0, 4, 16)) -> list[Row]:
    """Build the rows of corrections against staleness, without control."""
    return [Row("off", Run(staleness=s, algorithm=algorithm), seeds) for s in staleness for algorithm in ALGORITHMS]


def steadied(seeds: Sequence[int], staleness: Sequence[int] = (4, 16)) -> list[Row]:
    """Build the rows of what steadies training on old samples: a learning rate that falls with their age, control of
    the gradient, and both; each for four losses, with runs on fresh samples to compare with."""
    rows = []
    for base in (Run(), Run(updates=4), Run(algorithm=UNCAPPED), Run(algorithm=BLIND)):
        rows.append(Row("off", base, seeds))
        rows += [
            Row(label, replace(base, staleness=s, gac=gac, lr_staleness=divisor), seeds)
            for s in staleness
            for label, (divisor, gac) in STEADIED.items()
        ]
    return rows


def search(seeds: Sequence[int]) -> list[Row]:
    """Build the rows of the search. At staleness 8 and 16: thresholds, placement, skips, with and without a ratio; at
    0: no control. The last rows use a batch with eight times the work, at 16, with a few of the controls."""
    large = Run(groups=64, group_size=16, lr=6e-4)
    rows = []
    for base, controls, stale in ((SMALL, SEARCHED, (8, 16)), (large, ARMS, (16,))):
        for algorithm in (BLIND, DEFAULT):
            rows.append(Row("off", replace(base, algorithm=algorithm), seeds))
            rows += [
                Row(label, replace(base, algorithm=algorithm, staleness=s, gac=gac), seeds)
                for s in stale
                for label, gac in controls.items()
            ]
    return rows


def confirmed(searched: Sequence[Row], reward_of: Callable[[Row], float], seeds: Sequence[int]) -> list[Row]:
    """Return, for each setting of the small-batch search, its runs without control and with the best control, on seeds
    outside the search."""
    rows = []
    small = [row for row in searched if row.run.groups == SMALL.groups]
    for _, of_setting in groupby(small, key=lambda row: (row.run.algorithm, row.run.staleness)):
        listed = list(of_setting)
        controlled = [row for row in listed if row.run.gac.enabled]
        rows += [row for row in listed if not row.run.gac.enabled]
        rows += [max(controlled, key=reward_of)] if controlled else []
    return [replace(row, seeds=seeds) for row in rows]


ON = GAC(enabled=True)
STEADIED: Mapping[str, tuple[LrStaleness, GAC]] = {
    "off": ("none", GAC()),
    "lr / sqrt(1 + s)": ("sqrt", GAC()),
    "lr / (1 + s)": ("linear", GAC()),
    "control": ("none", ON),
    "control, lr / sqrt(1 + s)": ("sqrt", ON),
}
SMALL = Run()
_CALIBRATED = ARMS["calibrated"]
SEARCHED: Mapping[str, GAC] = {
    **ARMS,
    "wide, .2 and .6": GAC(enabled=True, c_low=0.2, c_high=0.6),
    "projection alone, .05": GAC(enabled=True, max_skips=0),
    "projection alone, 0": GAC(enabled=True, max_skips=0, c_low=0.0),
    "skips alone, .2": GAC(enabled=True, c_low=0.2, c_high=0.2),
    "calibrated, no skips": replace(_CALIBRATED, max_skips=0),
    "calibrated, 4 skips": replace(_CALIBRATED, max_skips=4),
    "calibrated, on the update": replace(_CALIBRATED, where="update"),
    "on the update": GAC(enabled=True, where="update"),
    "on the update, no skips": GAC(enabled=True, where="update", max_skips=0),
}
