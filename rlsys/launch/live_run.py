"""Training from a Python program or a notebook, with functions and rows that it defines, and the run while it trains.

    run = rlsys.start(config, reward=my_reward, data=rows)
    run.metrics[-1]["reward/mean"], run.generate("Sort 312")
    run.wait()

`rlsys.train` with the same arguments returns at the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from xxhash import xxh3_64_hexdigest

from rlsys.agents.agent import Policy
from rlsys.agents.workflow import SingleTurn
from rlsys.config import Config
from rlsys.config.loader import of_tree
from rlsys.data.row_files import drop_filled_nulls
from rlsys.errors import DataError, Interrupted
from rlsys.launch.doctor import ensure_not_shadowed
from rlsys.launch.earlier_runs import with_models_of_runs
from rlsys.launch.notebook_chart import ChartSink, is_notebook
from rlsys.launch.offline_commands import evaluate, evaluate_initial, export_once
from rlsys.launch.preflight import check_is_kept
from rlsys.launch.train_run import Stopping, TrainResult, train_job
from rlsys.loop.checkpoint_files import find_latest, local_checkpoint
from rlsys.loop.evaluation import EvalMetrics
from rlsys.monitoring.events import Event, StepDone
from rlsys.rewards.given_functions import give
from rlsys.types import Json, Prompt, Task
from rlsys.util.event_loops import run_to_end

Rows: TypeAlias = "Iterable[Mapping[str, Json]]"
"""Rows of data: dictionaries, as in a JSONL file; a `datasets.Dataset` is one."""
RewardGiven: TypeAlias = "Callable[..., object] | str | Sequence[Callable[..., object] | str]"
ROWS_FOLDER = ".rows"
"""Folder in `run.folder` with the rows that programs gave, by their hash."""


def train(
    config: Config,
    *,
    reward: RewardGiven | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    on_step: Callable[[StepDone], object] | None = None,
    progress: bool = True,
) -> TrainResult:
    """Run one training job, of one policy or several, to its end and return what it came to.

    `reward` replaces `reward.fn`: a function, the name of one, or a list of those, whose values are summed. `data` and
    `eval_data` replace `data.path` and `eval.data`; they are saved below `run.folder`, so that the run can be resumed.
    `on_step` is called after each step; only its first error is reported, and training goes on. `progress` shows the
    run on stderr, in a notebook as a chart too. A notebook's running event loop does not matter. After
    the run, a call of Ray raises an error until the program calls `ray.init`; a program that has called it before keeps
    its connection.

    Ctrl-C once finishes the step, saves, and raises `Interrupted`; twice exits at once. Raises the `RlsysError` that
    ended the run, after writing it to the run directory.
    """
    config = with_given(config, reward=reward, data=data, eval_data=eval_data)
    return train_job(config, progress=progress, sinks=_sinks(config, on_step, progress=progress))


def start(
    config: Config,
    *,
    reward: RewardGiven | None = None,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    on_step: Callable[[StepDone], object] | None = None,
    progress: bool = True,
) -> Run:
    """Start a training job in a thread, with the arguments of `train`, and return it while it runs."""
    config = with_given(config, reward=reward, data=data, eval_data=eval_data)
    return Run(config, on_step, progress=progress)


class Run:
    """One training job that runs in a thread of this process."""

    def __init__(self, config: Config, on_step: Callable[[StepDone], object] | None, *, progress: bool) -> None:
        """Start it. `metrics` has those of each step so far."""
        self.config, self.metrics = config, list[Mapping[str, float]]()
        self._result: TrainResult | None = None
        self._error: BaseException | None = None
        self._stopping = Stopping()
        sinks = [CallbackSink(self._note), *_sinks(config, on_step, progress=progress)]
        self._thread = threading.Thread(target=self._main, args=(sinks, progress), name="rlsys run", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.config.run_dir

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Finish the current step, save, and end. Returns at once; `wait` returns at the end."""
        self._stopping.request()

    def wait(self, timeout_s: float | None = None) -> TrainResult | None:
        """Wait for the end of the run, and return its result; None after a `stop`, or if it runs for longer.

        Raises the error that ended the run. Ctrl-C stops the run, and is raised again at its end.
        """
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
            raise
        if self._error is not None and not isinstance(self._error, Interrupted):
            raise self._error
        return self._result

    def generate(self, prompt: Prompt, *, temperature: float | None = None, seed: int = 0) -> str:
        """Return the newest saved policy's reply to a prompt; see `generate_each`."""
        return self.generate_each([prompt], temperature=temperature, seed=seed)[0]

    def generate_each(self, prompts: Sequence[Prompt], *, temperature: float | None = None, seed: int = 0) -> list[str]:
        """Return the newest saved policy's replies to prompts.

        `temperature` is that of `rollout` by default; 0 takes the most likely tokens. The policy is the initial model
        until a checkpoint is saved. It is loaded in this process, on the local engine.
        """
        config = self.config
        if temperature is not None:
            rollout = config.rollout.model_copy(update={"temperature": temperature})
            config = config.model_copy(update={"rollout": rollout})
        return generate(config, prompts, seed=seed)

    def evaluate(self, data: str | Rows | None = None) -> dict[str, EvalMetrics]:
        """Evaluate the newest saved policy, see `rlsys.evaluate`: on the data sets of `eval.data`, on these rows, or on
        the file `data`. The policy is the initial model until a checkpoint is saved.

        It starts workers beside those of the run, so the machine needs room for both until the run is over.
        """
        sets = None if data is None else {"data": data if isinstance(data, str) else str(saved_rows(self.config, data))}
        if find_latest(self.config.checkpoints_at) is None:
            return evaluate_initial(with_models_of_runs(self.config), sets)
        return evaluate(str(self.folder), data=sets)

    def _note(self, step: StepDone) -> None:
        self.metrics.append({"step": step.step, **step.metrics})

    def _main(self, sinks: Sequence[Any], progress: bool) -> None:
        try:
            self._result = train_job(self.config, progress=progress, sinks=sinks, stopping=self._stopping)
        except BaseException as error:  # noqa: BLE001  (raised again by `wait`)
            self._error = error


class CallbackSink:
    """Sink of a function that is called after each step."""

    def __init__(self, on_step: Callable[[StepDone], object]) -> None:
        self._on_step = on_step

    def handle(self, event: Event, time_s: float) -> None:
        if isinstance(event, StepDone):
            self._on_step(event)

    def close(self) -> None: ...


def with_given(config: Config, *, reward: RewardGiven | None, data: Rows | None, eval_data: Rows | None) -> Config:
    """Return the configuration with what a program gives in place of `reward.fn`, `data.path` and `eval.data`.

    Raises `ConfigError` for a reward that is no function, `DataError` for rows that cannot be saved.
    """
    changes: dict[str, Any] = {}
    if reward is not None:
        changes["reward"] = {"fn": _functions(reward)}
    if data is not None:
        changes["data"] = {"path": str(saved_rows(config, data))}
    if eval_data is not None:
        changes["eval"] = {"data": {"data": str(saved_rows(config, eval_data))}}
    if not changes:
        return config
    tree = config.model_dump(mode="json")
    return of_tree(Config, {**tree, **{key: {**tree[key], **more} for key, more in changes.items()}}, "the program")


def _functions(reward: RewardGiven) -> str | list[dict[str, str]]:
    if isinstance(reward, str) or callable(reward):
        return reward if isinstance(reward, str) else give(reward)
    specs: list[str] = []
    for each in reward:
        specs.append(each if isinstance(each, str) else give(each, specs))
    return [{"fn": spec} for spec in specs]


def saved_rows(config: Config, rows: Rows) -> Path:
    """Write rows to a file below `run.folder`, named after their content, and return it. Raises `DataError`, or
    `ConfigError` for a folder that will be deleted."""
    check_is_kept(config.run.folder)
    lines: list[bytes] = []
    is_columnar = hasattr(rows, "column_names")  # a data set of the `datasets` library, which is not imported here
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"data: row {number} is {row!r}; give dictionaries, such as {{'prompt': '2+3?', 'answer': '5'}}"
            )
        try:
            lines.append(orjson.dumps(drop_filled_nulls(dict(row)) if is_columnar else dict(row)))
        except orjson.JSONEncodeError as error:
            raise DataError(f"data: row {number} cannot be saved as JSON: {error}; give plain values") from error
    if not lines:
        raise DataError("data: there are no rows")
    content = b"\n".join([*lines, b""])
    path = (config.run.folder / ROWS_FOLDER / f"{xxh3_64_hexdigest(content)}.jsonl").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("xb") as file:
        file.write(content)
    return path


def generate(config: Config, prompts: Sequence[Prompt], *, seed: int = 0) -> list[str]:
    """Return replies of the newest saved policy of a run, or of its initial model, to these prompts."""
    from workers.rollout.local_policies import live_policies

    ensure_not_shadowed()

    checkpoint = find_latest(config.checkpoints_at)
    if checkpoint is not None:
        path = str(export_once(local_checkpoint(checkpoint, config.run_dir)))
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})

    async def reply(policies: Mapping[str, Policy], index: int, prompt: Prompt) -> str:
        session = SingleTurn().session(Task(id=f"prompt-{index}", prompt=prompt), policies, seed, index, {})
        episode = await SingleTurn().play(session)
        return episode.trajectories[0].turns[-1].text

    async def replies() -> list[str]:
        async with live_policies(config) as policies:
            return await asyncio.gather(*(reply(policies, *each) for each in enumerate(prompts)))

    return run_to_end(replies)


def _sinks(config: Config, on_step: Callable[[StepDone], object] | None, *, progress: bool) -> list[Any]:
    sinks: list[Any] = [CallbackSink(on_step)] if on_step else []
    return [*sinks, ChartSink()] if progress and is_notebook() else sinks
