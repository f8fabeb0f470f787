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

from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.lead_subagents.prepare import prepare
from examples.study import Comparison, Row
from examples.tiny_policy import Figures, WarmStart

CASES = ("joint-3", "lead-3", "subagent-3", "joint-2", "joint-1")
AGENTS = {"joint": ("both", ""), "lead": ("the lead", "subagent"), "subagent": ("subagents", "lead")}
"""Name in the table and frozen agent, by trained agents."""


def overrides_of(case: str) -> tuple[str, ...]:
    """Overrides of a case: trained agents and number of subagents, `lead-3`."""
    agents, _, width = case.partition("-")
    return (f"rollout.workflow.max_subagents={width}", f"algorithm.frozen_agents=[{AGENTS[agents][1]}]")


def prepare_seed(seed: int) -> tuple[Path, Figures]:
    """Fill the folder of a seed; return it with the figures of the warm start."""
    folder = Path(".cache/lead_subagents") / f"seed{seed}"
    return folder, prepare(folder, WarmStart(seed=seed))


def figures_of(rows: Sequence[Mapping[str, float]]) -> Row:
    """Extract the figures of a run from its metrics: item-F1 before and after it."""
    before, after = (row["eval/held_out/mean"] for row in rows if "eval/held_out/mean" in row)
    return {"f1_before": before, "f1_after": after}


COMPARISON = Comparison(
    example="lead_subagents",
    prepare_seed=prepare_seed,
    figures_of=figures_of,
    head=("trained", "subagents"),
    columns={
        "item-F1 before": ("f1_before", ".3f", ""),
        "item-F1 after": ("f1_after", ".3f", ""),
        "CPU-s": ("cpu_s", ".0f", ""),
    },
    is_evaluated=True,
)


if __name__ == "__main__":
    parser = COMPARISON.parser(__doc__, steps=40)
    parser.add_argument("--cases", default=",".join(CASES), help="who is trained, and how many subagents there are")
    options = parser.parse_args()
    parts = [case.partition("-") for case in options.cases.split(",")]
    COMPARISON.show({(AGENTS[who][0], width): overrides_of(f"{who}-{width}") for who, _, width in parts}, options)
