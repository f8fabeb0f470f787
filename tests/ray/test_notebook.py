"""A notebook defines rows and a reward in cells, trains the tiny policy, sees it live, and samples from it."""

from __future__ import annotations

import textwrap
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import rlsys
from rlsys.launch import Run
from rlsys.loop.checkpoint_files import find_latest, step_of
from tests.jobs import config_of

pytestmark = pytest.mark.ray

CELLS = [
    """
    import random, rlsys
    from rlsys import Config

    rows = [{"prompt": "".join(random.Random(i).choices("123456789", k=3)) + ">", "level": i % 2} for i in range(64)]

    def starts_low(completion, prompt, level):
        return float(completion[:1] == min(prompt[:-1]))

    keys = [
        "run.folder=RUNS", "model.path=MODEL", "data.max_prompt_tokens=8", "rollout.max_new_tokens=4",
        "algorithm.group_size=4", "train.groups_per_step=4", "train.lr=1e-3", "stabilizer=null",
    ]
    config = Config.load([], [*keys, "run.name=note", "run.steps=3"])
    """,
    """
    seen = []
    run = rlsys.start(config, reward=starts_low, data=rows, on_step=lambda step: seen.append(step.step))
    run.wait()
    """,
    """
    assert seen == [row["step"] for row in run.metrics] == [1, 2, 3]
    assert run.is_over and run.wait().steps == 3
    print("replied", repr(run.generate("312>", temperature=0)))
    assert run.generate("312>", temperature=0) == run.generate_each(["312>", "21>"], temperature=0)[0]
    """,
    """
    config = Config.load([], [*keys, "run.name=again", "run.steps=1"])
    answered = ({**row, "answer": "1"} for row in rows)
    again = rlsys.train(config, reward=[starts_low, "exact"], data=answered, progress=False)
    print("trained", again.steps)
    """,
]


@pytest.mark.nightly
def test_a_notebook_trains_on_rows_and_a_reward_of_its_cells(model_path: Path, tmp_path: Path):
    texts = [textwrap.dedent(cell).strip() for cell in CELLS]
    cells = [text.replace("RUNS", str(tmp_path / "runs")).replace("MODEL", str(model_path)) for text in texts]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    charts = [output["data"].get("text/html", "") for output in notebook.cells[1].outputs if "data" in output]
    assert any("step 3 of 3" in chart and "finished" in chart and "<svg" in chart for chart in charts)
    printed = "".join(output.get("text", "") for cell in notebook.cells[2:] for output in cell.outputs)
    assert "replied '" in printed and "trained 1" in printed


def test_a_run_is_evaluated_before_its_first_checkpoint(cluster, model_path: Path, data_path: Path, tmp_path: Path):
    run = Run(config_of(model_path, data_path, tmp_path, ["run.steps=2"]), None, progress=False)
    run.stop()
    run.wait()
    rows = [{"prompt": "31>", "answer": "13"}, {"prompt": "21>", "answer": "12"}]
    assert find_latest(run.folder / "checkpoints") is None
    (measures,) = run.evaluate(rows).values()
    assert measures.num_tasks == 2


@pytest.mark.nightly
def test_a_run_in_a_thread_stops_in_order_and_saves(cluster, model_path: Path, data_path: Path, tmp_path: Path):
    begun = threading.Event()
    config = config_of(model_path, data_path, tmp_path, ["run.steps=500"])
    run = rlsys.start(config, on_step=lambda step: begun.set(), progress=False)
    assert begun.wait(120)
    run.stop()
    assert run.wait() is None and run.is_over
    saved = find_latest(run.folder / "checkpoints")
    assert saved is not None and step_of(saved) == run.metrics[-1]["step"] < 500
