"""Three steps of the algorithm that a configuration names `best_of_group`; prints their losses.

Run by a test in an environment where that package is installed: `python -m tests.own_algorithm FOLDER`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rlsys.batch.packing import plan_batch
from rlsys.batch.tensors import StepData
from rlsys.config import Config
from rlsys.types import Distribution
from tests.models import random_group, save_model, tiny_qwen3
from tests.training import group_of
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

NEEDED = ["run.steps=1", "model.path=m", "data.path=d"]


def main() -> None:
    """The model is written to the folder of the command line."""
    algorithm = Config.load([], [*NEEDED, "algorithm.type=best_of_group", "algorithm.at_least=0.1"]).algorithm
    payloads = [random_group(random.Random(seed), 4) for seed in range(2)]
    groups = [group_of(group_id, payload) for group_id, payload in enumerate(payloads)]
    assert all(algorithm.can_learn_from(group) for group in groups)
    assigned = [tuple(algorithm.advantages(group)) for group in groups]
    assert [len(of_group) for of_group in assigned] == [1, 1]
    plan = plan_batch(groups, assigned, algorithm.aggregation, num_ranks=1, max_tokens=512)[0]
    backend = FsdpBackend(
        save_model(Path(sys.argv[1]), tiny_qwen3()), OptimizerSettings(lr=1e-2, total_steps=10), RankGroup()
    )
    data = StepData(payloads, [{}, {}])
    print(*(backend.train_step(plan, data, algorithm, distribution=Distribution(1.0))["loss"] for _ in range(3)))


if __name__ == "__main__":
    main()
