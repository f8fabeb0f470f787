"""The pages about algorithms, stability and agents match the code: tables, configurations, classes."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

import rlsys.testing
from rlsys.algorithm import Algorithm
from rlsys.config import Config
from rlsys.testing import play_scripted
from rlsys.types import Message, Task

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| `(\w+)` \|.*\| (\w+) \| ([\w ]+) \| (\w+) \|$", re.MULTILINE)
ROWS = ROW.findall((DOCS / "algorithms.md").read_text())


def blocks(language: str) -> list[str]:
    pages = [(DOCS / name).read_text() for name in ("algorithms.md", "stability.md", "agents.md")]
    return [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


def configured(**sections: Any) -> Config:
    needed = {
        "run": {"steps": 100},
        "model": {"path": "m"},
        "data": {"path": "d.jsonl"},
        "reward": {"fn": "r.py:reward"},
    }
    return Config.model_validate({**needed, **sections})


def algorithm_of(name: str) -> Algorithm:
    workflow = "demonstrations" if name == "sft" else "single_turn"
    return configured(algorithm={"type": name}, rollout={"workflow": workflow}).algorithm


def test_every_installed_algorithm_has_a_row() -> None:
    from importlib.metadata import entry_points

    ours = {point.name for point in entry_points(group="rlsys.algorithms") if point.value.startswith("algorithms.")}
    assert {row[0] for row in ROWS} == ours


def test_every_installed_workflow_has_a_row() -> None:
    from importlib.metadata import entry_points

    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "agents.md").read_text(), re.MULTILINE)
    assert set(rows) - {"type"} == set(entry_points(group="rlsys.workflows").names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_what_the_defaults_are(row: tuple[str, str, str, str]) -> None:
    name, over, correction, staleness = row
    algorithm = algorithm_of(name)
    assert algorithm.aggregation.over == over
    assert str(algorithm.max_safe_staleness or "any") == staleness
    if correction != "its own":
        names = ", ".join(part.type for part in getattr(algorithm, "correction"))  # noqa: B009
        assert (names or "none") == correction


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_shown_is_read(block: str) -> None:
    configured(**yaml.safe_load(block))


def test_the_algorithm_shown_assigns_and_takes_a_loss() -> None:
    namespace: dict[str, Any] = {}
    block, _ = blocks("python")
    exec(compile(block, "algorithms.md", "exec"), namespace)
    assert namespace["Reinforce"](baseline=0.3).max_safe_staleness == 0


def test_the_test_of_plug_ins_that_the_guide_shows_passes(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "guide.md").read_text(), re.DOTALL):
        if "Reinforce" in block or "SecondThought" in block:
            exec(compile(block, "guide.md", "exec"), namespace)
    namespace["test_my_algorithm_trains_what_my_workflow_says"](tmp_path / "run")


def test_the_test_of_plug_ins_that_the_fakes_show_passes(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    shown = re.findall(r"^    .*$|^$", rlsys.testing.__doc__ or "", re.MULTILINE)
    exec(compile(dedent("\n".join(shown)), "rlsys.testing", "exec"), namespace)
    namespace["test_my_plug_ins_train"](tmp_path / "run")


def test_the_workflow_shown_lets_its_agent_search() -> None:
    namespace: dict[str, Any] = {"find": lambda query: [query, "more"]}
    _, block = blocks("python")
    exec(compile(block, "agents.md", "exec"), namespace)
    call = '<tool_call>{"name": "search", "arguments": {"query": "cats", "limit": 1}}</tool_call>'
    task = Task(id="t", prompt=(Message(role="user", content="Which?"),))
    episode = play_scripted(namespace["Ask"](), task, lambda said: "cats it is" if '["cats"]' in said else call)
    assert [turn.text for turn in episode.trajectories[0].turns] == [call, "cats it is"]
