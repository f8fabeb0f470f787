"""Damaged configurations: the command line accepts them, or refuses them in words."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from rlsys.cli import check, train
from rlsys.config import Config
from rlsys.errors import RlsysError
from tests.damage import ODD_YAML, damage

CONFIGURATIONS_PER_CASE = 10
WHOLE = """\
run: {name: sums, steps: 5, seed: 3}
model:
  path: FOLDER
data:
  path: FOLDER/rows.jsonl
  columns: {prompt: prompt}
reward:
  fn:
    - fn: exact
    - {fn: exact, name: again, weight: 0.5, args: {a: [1, {b: 2}]}}
resources: {reward: {cpus: 1}}
algorithm: {type: grpo, group_size: 4, clip_high: 0.3}
stabilizer: gac
rollout:
  replicas: 2
  vllm_args: {gpu_memory_utilization: 0.8}
  workflow: {type: play, environment: "mcp:python server.py", args: {timeout_s: 3}}
train: {groups_per_step: 4, betas: [0.9, 0.99], lr: 1e-5}
asynchrony:
  max_staleness: 1
eval: {data: {held: FOLDER/rows.jsonl, hard: FOLDER/rows.jsonl}, every: 2, samples: 2, temperature: 0.7}
alerts: {entropy_collapse: 0.1, idle_side: null}
tracking:
  - tensorboard
  - {type: wandb, project: sums}
"""
POLICIES = """\
run: {steps: 5}
model: {path: FOLDER}
data: {path: FOLDER/rows.jsonl}
policies:
  proposer: {}
  solver: {train: {lr: 1e-5}, algorithm: {type: grpo, clip_high: 0.3}}
  judge:
    train: null
    model: {path: other}
agents: {a: proposer, b: solver}
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return valid_configurations(tmp_path_factory.mktemp("valid"))


def valid_configurations(folder: Path) -> list[tuple[str, str]]:
    """Names and texts of valid configurations: as a user writes them, resolved, and as JSON."""
    (folder / "rows.jsonl").write_text('{"prompt": "2+3?", "answer": 5}\n')
    found = []
    for text in (WHOLE, POLICIES):
        (folder / "job.yaml").write_text(text.replace("FOLDER", str(folder)))
        config = Config.load(folder / "job.yaml")
        found += [("job.yaml", (folder / "job.yaml").read_text()), ("job.yaml", config.to_yaml())]
        found += 2 * [("job.json", json.dumps(config.model_dump(mode="json")))]
    return found


def test_a_damaged_configuration_is_valid_or_refused_in_words(
    written: list[tuple[str, str]], tmp_path: Path, fuzz_case: int
) -> None:
    random = Random(fuzz_case)
    for _ in range(CONFIGURATIONS_PER_CASE):
        use_damaged(written, tmp_path, random)


def use_damaged(written: list[tuple[str, str]], folder: Path, random: Random) -> None:
    """Damage one of these configurations, and check it, load it and start to train with it."""
    name, text = random.choice(written)
    path = folder / name
    path.write_text(text)
    for _ in range(random.choice([1, 1, 2])):
        damage(path, random)
    overrides = random.choice([[], [], [f"{random.choice(KEYS)}={random.choice(ODD_YAML)}"]])
    with suppress(RlsysError):
        check([str(path), *overrides])
        assert Config.load(path, overrides).to_yaml()
        train([str(path), *overrides], dry_run=True)


KEYS = ("run", "run.steps", "model.path", "reward.fn", "train.lr", "eval.data", "policies", "rollout.vllm_args", "x.y")
