"""Plug-in interface of workflows: the conversation of agents on a task, in ordinary async Python.

    @dataclass(frozen=True, kw_only=True)
    class Retry(Workflow):
        times: int = 2

        async def run(self, session: Session) -> None:
            solver = session.agent("solver")
            answer = await solver.chat(session.task.prompt)
            for _ in range(self.times):
                if "?" in answer:
                    answer = await solver.chat("Decide.")

The fields are the configuration: `rollout.workflow: {type: my.module:Retry, times: 3}`. Authors see messages and text.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlsys.agents import session as sessions
from rlsys.agents.agent import Agent, AgentStopped, BudgetSpent, ContextFull, Policy, Reply
from rlsys.agents.session import Session
from rlsys.agents.session_budget import Budget
from rlsys.errors import DataError, RlsysError, ToolError, WorkflowError, first_of
from rlsys.types import POLICY, Answers, Distribution, Episode, Task, Trajectory, failed

__all__ = [
    "Agent",
    "AgentStopped",
    "BudgetSpent",
    "ContextFull",
    "Reply",
    "Session",
    "SingleTurn",
    "Workflow",
    "play",
    "play_or_fail",
]


@dataclass(frozen=True, kw_only=True)
class Workflow(Budget):
    """Base class of workflows: implement `run`. One instance serves many sessions at once, so keep state in locals.

    A subclass with new fields is also a frozen keyword-only dataclass; a subclass without them needs no decorator.
    """

    answers: ClassVar[Answers] = "sampled"
    """Origin of the answers; an algorithm has to be made for it, see `Algorithm.answers`."""
    loss_over: ClassVar[Literal["agents"] | None] = None
    """Default of `algorithm.over` in a configuration with this workflow, for an algorithm that averages over tokens."""
    opens_with_prompt: ClassVar[bool] = False
    """True if the first prompt of an agent is that of the task. Then the prompts are checked before a run starts."""
    speaks_once: ClassVar[bool] = False
    """True if no agent speaks twice. Then engines keep nothing of a reply for a prompt that goes on from it."""
    is_light: ClassVar[bool] = False
    """True if sessions run no code of users, no tools and no environments. Not inherited: a subclass has its own code.
    Where no GPU needs the process to itself, sessions then share the process of a replica."""

    async def run(self, session: Session) -> None:
        """Play one episode: create agents, chat.

        `AgentStopped` truncates the episode and `ToolError` fails it. Any other exception also fails it, with the
        traceback as the reason; before the policy's first reply, its group is attempted again, see `play_or_fail`.
        """
        raise NotImplementedError(f"{type(self).__name__} plays nothing: implement `run`")

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` or `DataError`, before the run starts, for settings or tasks that cannot be played.

        `tasks` are those of training, in the order of the file; `group_size` is `algorithm.group_size`,
        and `distribution` that of `rollout`.
        """

    def in_evaluation(self) -> Workflow:
        """Return the workflow that evaluation uses; by default, this one."""
        return self

    def session(
        self,
        task: Task,
        policies: Mapping[str, Policy],
        seed: int,
        episode_index: int,
        bindings: Mapping[str, str],
        token_limit: int | None = None,
    ) -> Session:
        """Create a session for one episode, with this workflow's budget, and at most `token_limit` tokens."""
        return Session(
            task,
            policies,
            seed=seed,
            episode_index=episode_index,
            bindings=bindings,
            budget=self,
            token_limit=token_limit,
        )

    async def play(self, session: Session) -> Episode:
        """Run the workflow in a session, and return its episode. Requests still in progress at the end are cancelled.

        The episode is truncated by an `AgentStopped` and failed by a `ToolError`, also within a task group's
        exceptions. Any other error of `run` is raised.
        """
        ended: BaseException | None = None
        try:
            await self.run(session)
        except (AgentStopped, ToolError) as error:
            ended = error
        except ExceptionGroup as errors:
            stops, others = errors.split((AgentStopped, ToolError))
            if others is not None:
                raise others from None
            broken = stops.subgroup(ToolError) if stops else None
            ended = first_of(broken or errors)
        finally:
            await session.close()
        if isinstance(ended, ToolError):
            return _failed_episode(session, str(ended))
        if ended is not None and session.agents:
            session.agents[0].is_cut = True
        return session.episode()


class SingleTurn(Workflow):
    """One agent, one reply to the task's prompt. The tools of the task are on offer; calls in the reply are not run."""

    opens_with_prompt = True
    speaks_once = True
    is_light = True

    async def run(self, session: Session) -> None:
        await session.agent(POLICY).chat(session.task.prompt, tools=session.task.tools)


async def play(workflow: Workflow, session: Session, worker: str) -> Episode:
    """Run a workflow in a session, and return the recorded episode.

    A bug in the workflow becomes a `WorkflowError` of this worker, with the traceback from the author's code and the
    transcript; a `RlsysError` is raised unchanged.
    """
    try:
        return await workflow.play(session)
    except (Exception, SystemExit) as raised:  # noqa: BLE001  (raised again, with the transcript)
        error = first_of(raised) if isinstance(raised, ExceptionGroup) else raised
        if isinstance(error, RlsysError):
            raise error from None
        phase = f"running {type(workflow).__name__} on task {session.task.id}"
        raise WorkflowError(worker, phase, _report_of(error, session)) from None


async def play_or_fail(workflow: Workflow, session: Session, worker: str) -> Episode:
    """Run a workflow in a session as `play` does, except that errors after the policy's first reply fail the episode.

    The reply may have caused them: an agent framework that gave up, a number that cannot be read, messages that the
    chat template refuses. The episode's reason is the report. An error before the first reply is raised, for no reply
    has caused it: its group is attempted again. A bug that fails every group ends the run, see `limits.failed_share`.
    Failures of workers, and other `RlsysError`s than `DataError`, are raised unchanged.
    """
    try:
        return await play(workflow, session, worker)
    except (WorkflowError, DataError) as error:
        if not session.has_replies:
            raise
        return _failed_episode(session, str(error))


def _failed_episode(session: Session, reason: str) -> Episode:
    """Episode of a session that failed, with what was said."""
    if not session.agents:
        return Episode((Trajectory(POLICY, (), failed(reason)),))
    session.agents[0].fail(reason)
    return session.episode()


def _report_of(error: BaseException, session: Session) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    callers = {(__file__, "play"), (sessions.__file__, "_result_or_error")}
    ours = [i for i, frame in enumerate(frames, 1) if (frame.filename, frame.name) in callers]
    own = frames[max(ours, default=0) :]
    parts = [f"{type(error).__name__}: {error}", "".join(traceback.format_list(own))]
    if session.log:
        parts.append(f"what was said:\n{session.transcript()}")
    return "\n".join(part.rstrip() for part in parts if part)
