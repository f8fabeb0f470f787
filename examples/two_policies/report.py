"""Report of a run: `python -m examples.two_policies.report runs/two_policies`.

From the rollouts of the first and the last five steps: the share of the proposer's replies that are a task of different
digits, and the share of the solver's correct answers to such tasks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from examples.two_policies.play import NUM_DIGITS
from rlsys.replay.rollout_parquet import read_records, rollout_paths
from rlsys.types import Episode

NUM_STEPS = 5


class Share(NamedTuple):
    """Shares over some steps."""

    proper: float
    """Share of proposals that are tasks with more than one digit in them."""
    right: float
    """Share of correct answers to such tasks."""


def share_of(episodes: Sequence[Episode]) -> Share:
    """Compute the shares over these episodes; a proposer without a turn proposed nothing."""
    proper = []
    for episode in episodes:
        said = "".join(turn.text for turn in episode.trajectories[0].turns[:1])
        if said.isdigit() and len(said) == NUM_DIGITS and len({*said}) > 1:
            proper.append(episode)
    rewards = [t.reward or 0.0 for episode in proper for t in episode.trajectories[1:]]
    return Share(len(proper) / len(episodes), fmean(rewards) if rewards else float("nan"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the first and the last steps of a run came to.")
    parser.add_argument("run", type=Path)
    paths = rollout_paths(parser.parse_args().run / "policies" / "proposer")
    for name, end in (("first", paths[:NUM_STEPS]), ("last", paths[-NUM_STEPS:])):
        share = share_of([e for path in end for record in read_records(path) for e in record.episodes])
        print(f"{name:5} {NUM_STEPS} steps: {share.proper:.2f} proper tasks, {share.right:.2f} of them solved")
