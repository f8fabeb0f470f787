"""Search for a learning rate with Ray Tune: at random, population-based, and with early ends; print a table.

    python -m examples.sort.search --seeds 0,1,2

Each search trains `examples/sort/run.yaml` with the model and data of the seed and one replica for each trial. The
learning rate is drawn from 1e-5 to 3e-2. `pbt` copies the best of four trials to the worst every fifth of the steps.
`asha` begins with twice as many trials and compares them at a quarter and a half of the steps. The reward of a trial
is the mean of its last fifth of the steps. Finished searches are lines of the file `--out` and not run again; all
figures are the last line of stdout, as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from examples.sort.prepare import prepare_seed
from examples.study import markdown, run_all

if TYPE_CHECKING:
    from ray.tune.schedulers import TrialScheduler

Kind: TypeAlias = Literal["random", "pbt", "asha"]
NUM_TRIALS = 4
LOWEST, HIGHEST = 1e-5, 3e-2
SCORE = "reward/mean"


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of one search."""

    kind: Kind
    seed: int
    steps: int
    """Of a trial that goes to its end."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found."""

    rewards: list[float]
    """Reward of each trial that went to its end, best first."""
    lr: float
    """Learning rate of the best trial at its end."""
    num_steps: int
    """Steps of all trials together."""
    seconds: float


def search(run: Search) -> Found:
    """Run one search, on a cluster of its own."""
    import ray
    from ray import tune

    from rlsys import Config
    from rlsys.tune import trainable

    prepared, _ = prepare_seed(run.seed)
    every = run.steps // 5 if run.kind == "pbt" else 0
    overrides = [
        f"model.path={prepared / 'model'}",
        f"data.path={prepared / 'train.jsonl'}",
        f"eval.data={{held_out: {prepared / 'eval.jsonl'}}}",
        f"run.seed={run.seed}",
        f"run.steps={run.steps}",
        f"checkpoint.every={every}",
        "rollout.replicas=1",
        "record.rollouts_every=0",
    ]
    config = Config.load(["examples/sort/run.yaml"], overrides)
    began = time.monotonic()
    num_trials = NUM_TRIALS * (2 if run.kind == "asha" else 1)
    with tempfile.TemporaryDirectory(prefix="search_") as folder:
        ray.init(num_cpus=2 * num_trials, include_dashboard=False, log_to_driver=False)
        tuner = tune.Tuner(
            trainable(config),
            param_space={"train.lr": tune.loguniform(LOWEST, HIGHEST)},
            tune_config=tune.TuneConfig(
                metric=SCORE,
                mode="max",
                num_samples=num_trials,
                search_alg=tune.search.BasicVariantGenerator(random_state=run.seed),
                scheduler=scheduler(run),
            ),
            run_config=tune.RunConfig(name="search", storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        ray.shutdown()
        found = []
        for result in results:
            if result.error is not None:
                raise result.error
            rows = rewards_of(Path(result.path))
            assert result.config is not None and result.metrics is not None
            reward, lr = fmean(rows[-(run.steps // 5) :]), result.config["train.lr"]
            found.append((reward, lr, len(rows), result.metrics["step"]))
    whole = sorted((each for each in found if each[3] >= run.steps), reverse=True)
    seconds = time.monotonic() - began
    return Found([reward for reward, *_ in whole], whole[0][1], sum(num for _, _, num, _ in found), seconds)


def scheduler(run: Search) -> TrialScheduler | None:
    """Return the scheduler of Ray Tune; None: the trials only differ in their values."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    if run.kind == "pbt":
        return PopulationBasedTraining(
            time_attr="step",
            perturbation_interval=run.steps // 5,
            hyperparam_mutations={"train.lr": tune.loguniform(LOWEST, HIGHEST)},
            resample_probability=0.0,
            synch=True,
        )
    if run.kind == "asha":
        return ASHAScheduler(time_attr="step", max_t=run.steps, grace_period=run.steps // 4, reduction_factor=2)
    return None


def rewards_of(trial: Path) -> list[float]:
    """Read the rewards of all steps in the folder of a trial, in the order of its runs."""
    files = sorted(trial.glob("run*/metrics.jsonl"), key=lambda file: int(file.parent.name.removeprefix("run")))
    rows = (json.loads(line) for file in files for line in file.read_text().splitlines())
    return [row[SCORE] for row in rows if SCORE in row]


def main() -> None:
    """Run what is missing; print the table, then JSON in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="of the warm start, the runs and the search")
    parser.add_argument("--steps", type=int, default=100, help="of a trial that goes to its end")
    parser.add_argument("--out", type=Path, default=Path(".cache/sort/searches.jsonl"), help="finished searches")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    found = run_all(
        [Search(kind, seed, options.steps) for seed in seeds for kind in get_args(Kind)], search, Found, options.out
    )
    rows = []
    for kind in get_args(Kind):
        each = [found[Search(kind, seed, options.steps)] for seed in seeds]
        columns = (
            [f"{f.rewards[0]:.3f}" for f in each],
            [f"{f.lr:.1e}" for f in each],
            [str(f.num_steps) for f in each],
            [f"{f.seconds:.0f}" for f in each],
        )
        rows.append([kind, " / ".join(map(str, seeds)), *(" / ".join(column) for column in columns)])
    head = ["search", "seeds", "reward of the best trial, last steps", "its learning rate", "steps of all trials", "s"]
    print(markdown(head, rows))
    print(json.dumps({"runs": [{"run": asdict(run), **asdict(each)} for run, each in found.items()]}), flush=True)


if __name__ == "__main__":
    main()
