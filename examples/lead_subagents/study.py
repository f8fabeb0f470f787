"""Train lead and subagents together, one role alone, and fewer subagents; print a table.

    python -m examples.lead_subagents.study --seeds 0,1,2

Each run is `rlsys train examples/lead_subagents/run.yaml` with the seed, its model and its data, and one of these:

| case | changed |
| --- | --- |
| joint-3, joint-2, joint-1 | `rollout.workflow.max_subagents`, in training and evaluation |
| lead-3 | only the lead is trained: `algorithm.frozen_agents=[subagent]` |
| subagent-3 | only subagents are: `algorithm.frozen_agents=[lead]` |

Every finished run is a line of the file `--out`. Runs already in that file are skipped, so that an interrupted study
can continue. A Markdown table goes to stdout, and all figures as JSON to its last line. Item-F1 is that of 256 held-out
tables, one sample each at temperature 1, before and after training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from examples.lead_subagents.prepare import prepare
from examples.study import Comparison, Result, Row, Trial, trained
from examples.tiny_policy import WarmStart

CASES = ("joint-3", "lead-3", "subagent-3", "joint-2", "joint-1")
FROZEN = {"joint": "", "lead": "subagent", "subagent": "lead"}
"""Frozen agent, by trained agent."""
TRAINED = {"joint": "both", "lead": "the lead", "subagent": "subagents"}
MEASURED = "eval/held_out/mean"


def overrides_of(case: str) -> tuple[str, ...]:
    """Overrides of a case: trained agents and number of subagents, `lead-3`."""
    agents, _, width = case.partition("-")
    return (f"rollout.workflow.max_subagents={width}", f"algorithm.frozen_agents=[{FROZEN[agents]}]")


def train(trial: Trial) -> Result:
    """Train the policy of the seed, between two evaluations."""
    prepared = Path(".cache/lead_subagents") / f"seed{trial.seed}"
    prepare(prepared, WarmStart(seed=trial.seed))
    trial = replace(trial, overrides=(*trial.overrides, f"eval.every={trial.steps}"))
    return trained(trial, prepared, trial.steps + 2, figures_of)  # a row for every step and both evaluations


def figures_of(rows: list[dict[str, float]]) -> Row:
    """Extract the figures of a run from its metrics: item-F1 before and after it."""
    before, after = (row[MEASURED] for row in rows if MEASURED in row)
    return {"f1_before": before, "f1_after": after}


COMPARISON = Comparison(
    example="lead_subagents",
    train=train,
    head=("trained", "subagents"),
    columns={
        "item-F1 before": ("f1_before", ".3f", ""),
        "item-F1 after": ("f1_after", ".3f", ""),
        "CPU-s": ("cpu_s", ".0f", ""),
    },
)


def main() -> None:
    """Run the missing trials, and show all requested ones."""
    parser = COMPARISON.parser(__doc__, steps=40)
    parser.add_argument("--cases", default=",".join(CASES), help="who is trained, and how many subagents there are")
    options = parser.parse_args()
    parts = {case: case.partition("-") for case in options.cases.split(",")}
    COMPARISON.show(
        {(TRAINED[agents], width): overrides_of(case) for case, (agents, _, width) in parts.items()}, options
    )


if __name__ == "__main__":
    main()
