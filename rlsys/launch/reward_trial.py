"""Trial of the reward functions on one task of each source, before anything starts: the `--dry-run` of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlsys.agents.workflow import SingleTurn
from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch.preflight import key_of, training_tasks
from rlsys.rewards.reward_registry import JUDGE, SERVER
from rlsys.types import POLICY, Episode, Score, Task, Trajectory, Turn
from rlsys.util.event_loops import run_to_end


@dataclass(frozen=True)
class TriedReward:
    """Score of one made-up reply."""

    task: Task
    reply: str
    """The answer of the task, or nothing if it has none."""
    score: Score

    def line(self) -> str:
        """Line for a terminal."""
        parts = "".join(f", {name} {part:g}" for name, part in self.score.parts.items())
        return f"reward of the reply {self.reply!r} to task {self.task.id!r}: {self.score.value}{parts}"


def try_rewards(config: Config) -> list[TriedReward]:
    """Call the reward functions as a run does, in a killable process, on the first task of each source.

    Only for the workflow `single_turn`: others may set rewards themselves. Functions that ask a server are not called,
    and neither is the reward model. Raises `ConfigError` for a function that cannot score the answer of the task.
    """
    functions = [spec for spec in config.reward_functions if spec.fn not in (JUDGE, SERVER)]
    if not functions or type(config.rollout.workflow) is not SingleTurn:
        return []
    firsts = {source: tasks[0] for source, tasks in training_tasks(config).items()}
    from workers.reward.reward_worker import RewardWorker

    async def score() -> list[TriedReward]:
        worker = RewardWorker(functions, 1, config.reward.timeout_s)
        try:
            return [
                TriedReward(task, _reply(task), *await worker.score(task, (_answer_episode(task),)))
                for task in firsts.values()
            ]
        finally:
            await worker.close()

    tried = dict(zip(firsts, run_to_end(score), strict=True))
    if problems := list(_problems(tried)):
        raise ConfigError("\n".join(problems))
    return list(tried.values())


def _problems(tried: Mapping[str, TriedReward]) -> Iterator[str]:
    for source, one in tried.items():
        if one.score.value is None:
            yield (
                f"{key_of(source)}: the reward of the reply {one.reply!r} to task {one.task.id} fails: "
                f"{one.score.failure}; a run leaves such a sample out of training, and ends if all are so"
            )


def _reply(task: Task) -> str:
    return task.answer or ""


def _answer_episode(task: Task) -> Episode:
    turn = Turn((), (), (), (), "stop", _reply(task))
    return Episode((Trajectory(POLICY, (turn,)),))
