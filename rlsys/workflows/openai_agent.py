"""Training of any program with an OpenAI client: the workflow `openai_agent`.

    rollout:
      workflow: {type: openai_agent, agent: "my_agent:solve"}

    async def solve(prompt, base_url, api_key, model) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            reply = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
        return float("42" in reply.choices[0].message.content)

or an unmodified program, one process per episode:

    rollout:
      workflow: {type: openai_agent, command: [python, my_agent.py]}

Each episode has its endpoint (`rlsys.gateway`), and only conversations through it are trained. The agent runs
its tools itself, so `max_tool_calls` does not count them.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, SupportsFloat
from weakref import WeakKeyDictionary

from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.errors import ConfigError, DataError
from rlsys.gateway.gateway_server import HOST, Endpoint, shared_gateway
from rlsys.sandbox.programs import ProgramFailed, run_program
from rlsys.types import POLICY, Distribution, Task
from rlsys.util.importing import import_object
from rlsys.util.number_ranges import Count, Seconds
from rlsys.workflows.tool_use import loadable

ARGUMENTS = ("task", "prompt", "base_url", "api_key", "model")
"""Arguments that an agent function may request, by name."""
_ROOM: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()


class _Late(Exception):
    """An agent exceeded its deadline."""


@cache
def _function(spec: str) -> tuple[Callable[..., Awaitable[object]], tuple[str, ...]]:
    """Import an agent function; returns it and the names of its arguments. Raises `ValueError` if it is invalid."""
    found = import_object("agent", spec)
    if not callable(found) or not inspect.iscoroutinefunction(found):
        raise ValueError(f"the agent {spec!r} is not an async function; run other code as a `command`")
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return found, ARGUMENTS
    unknown = [p.name for p in parameters if p.name not in ARGUMENTS and p.default is p.empty]
    unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if wrong := unknown or unnamed:
        raise ValueError(f"the agent {spec!r} asks for {', '.join(wrong)}; by name there are {', '.join(ARGUMENTS)}")
    return found, tuple(p.name for p in parameters if p.name in ARGUMENTS)


@dataclass(frozen=True, kw_only=True)
class OpenAIAgent(Workflow):
    """An external agent behind an OpenAI client; give `agent` or `command`.

    An episode fails if the agent gets no reply at all, exceeds `deadline_s`, or is a program with an exit code other
    than 0: it is then left out of training. If the program fails or the function raises because a request was
    refused, the reason decides: the episode is truncated for a full context or a spent budget, and fails for messages
    that the chat template refuses. Any other exception of a function, such as the `MaxTurnsExceeded` of a framework,
    fails the episode; before the first reply, its group is attempted again.

    The agent of the last reply is the root of the episode: reward functions score that reply, regardless of the number
    of conversations.
    """

    agent: Annotated[str, loadable(_function)] | None = None
    """An async function, `module:function`. Its arguments are picked by name: `task`, `prompt`, `base_url`, `api_key`,
    `model`. It returns the episode's reward; or None or text, and then reward functions score the last reply. It runs
    in the event loop of the replica, where a client that is not async would block every session and deadlock: run
    such code as a `command`."""
    command: tuple[str, ...] = ()
    """A program and its arguments, in which `{prompt}` and `{model}` are filled in. It gets OPENAI_BASE_URL and
    OPENAI_API_KEY, and the prompt on stdin: text unchanged, messages as JSON."""
    model: str = POLICY
    """The model name in requests, which is also the name of the agent; in a run of several policies, bind it to a
    policy in `agents`."""
    deadline_s: Seconds = 600.0
    """Longest episode, seconds. Then the agent is cancelled or, if it is a program, killed with all that it started. A
    function that ignores cancellation continues without an endpoint."""
    max_processes: Count = 32
    """Concurrent programs on one replica; further ones wait, and their deadline starts after the wait."""

    def __post_init__(self) -> None:
        if (self.agent is None) == (not self.command):
            raise ValueError("give either `agent`, an async function, or `command`, a program")

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` if the program does not exist, `DataError` for a prompt that cannot be its argument."""
        with_nul = [task.id for task in tasks if isinstance(task.prompt, str) and "\0" in task.prompt]
        if with_nul and any("{prompt}" in part for part in self.command):
            raise DataError(
                f"rollout.workflow.command: the prompt of task {with_nul[0]} contains a NUL, which no argument of a "
                "program may: remove it, or let the program read the prompt on stdin"
            )
        if self.command and shutil.which(self.command[0], path=_search_path()) is None:
            raise ConfigError(f"rollout.workflow.command: there is no program {self.command[0]!r}")

    async def run(self, session: Session) -> None:
        """Serve the session to the agent until the agent ends, and set the reward that it returned."""
        try:
            async with shared_gateway() as gateway, gateway.serve(session) as endpoint:
                try:
                    returned = await self._run_agent(session.task, endpoint)
                finally:
                    await endpoint.close()
                    _seat(session, endpoint.conversations.last_speaker)
            if endpoint.conversations.last_speaker is None:
                for refusal in endpoint.refusals.values():
                    raise refusal from None
        except (ProgramFailed, _Late) as error:
            self._root(session).fail(str(error))
        except DataError as refusal:  # of messages: the policy's fault if it replied before, else the agent's
            root = self._root(session)
            if not root.turns and refusal.__cause__:
                raise refusal.__cause__ from None
            root.fail(str(refusal))
        else:
            self._judge(session, returned)

    def _judge(self, session: Session, returned: object) -> None:
        root = self._root(session)
        if not root.turns:
            root.fail(
                "the agent ended, and no request of it got a reply; is its client told the base URL, and to use no "
                f"proxy for {HOST}?"
            )
        elif isinstance(returned, str):
            session.note(root, "returned", returned)
        elif isinstance(returned, SupportsFloat):
            session.reward(float(returned))
        elif returned is not None:
            what = f"{type(returned).__name__} {returned!r:.60}"
            raise TypeError(f"the agent {self.agent!r} returned the {what}; give a number, text or None")

    def _root(self, session: Session) -> Agent:
        return session.agents[0] if session.agents else session.agent(self.model)

    async def _run_agent(self, task: Task, endpoint: Endpoint) -> object:
        if self.agent is None:
            text = task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt)
            command = [part.replace("{model}", self.model).replace("{prompt}", text) for part in self.command]
            async with _room(self.max_processes):
                program = run_program(command, env=_environment(endpoint), stdin=text)
                return await self._in_time(endpoint, program)
        values = (task, task.prompt, endpoint.base_url, endpoint.api_key, self.model)
        function, names = _function(self.agent)
        given = {name: value for name, value in zip(ARGUMENTS, values, strict=True) if name in names}
        return await self._in_time(endpoint, _without_exit(function(**given)))

    async def _in_time(self, endpoint: Endpoint, work: Awaitable[object]) -> object:
        limit = asyncio.timeout(self.deadline_s)
        try:
            async with limit:
                return await endpoint.while_sound(work)
        except TimeoutError:
            if not limit.expired():  # raised by the agent
                raise
            raise _Late(f"the agent took longer than {self.deadline_s:g} s (deadline_s)") from None


async def _without_exit(work: Awaitable[object]) -> object:
    """Await the agent's work. `sys.exit` in it becomes a `RuntimeError`, since in a task it would end the replica."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the agent called sys.exit({error.code!r})").with_traceback(error.__traceback__) from None


def _seat(session: Session, root: Agent | None) -> None:
    """Make `root` the root of all other agents, and remove agents without turns. Does nothing for None."""
    if root is None:
        return
    others = [agent for agent in session.agents if agent.turns and agent is not root]
    seated = {agent.index for agent in (root, *others)}
    for agent in others:
        agent.path = (0, *agent.path)
        agent.parent = agent.parent if agent.parent in seated else root.index
    root.path, root.parent = (), None
    session.agents[:] = [root, *others]


def _room(most: int) -> asyncio.Semaphore:
    rooms = _ROOM.setdefault(asyncio.get_running_loop(), {})
    return rooms.setdefault(most, asyncio.Semaphore(most))


def _environment(endpoint: Endpoint) -> dict[str, str]:
    """Environment of a program: this process's without the token of the Ray cluster, the endpoint, and no proxy for the
    endpoint."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_TOKEN")}
    mine = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key, "PATH": _search_path()}
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), HOST]))
    return {**inherited, **mine, "NO_PROXY": no_proxy, "no_proxy": no_proxy}


def _search_path() -> str:
    """This process's `PATH`, with its Python interpreter first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
