"""Offline training: the workflow `offline`, which reads completions from the data and samples nothing.

    {"prompt": "385120>", "completion": "012358", "label": true}
    {"prompt": [{"role": "user", "content": "2+3?"}], "completion": [{"role": "assistant", "content": "6"}], "label": 0}

    {"prompt": "385120>", "chosen": "012358", "rejected": "123580"}

Rows are TRL's preferences. Unpaired ones have a `completion`, and `label` marks whether it is wanted. Paired ones have
the answers `chosen` and `rejected`, each a trajectory of the episode. The reward of an answer is 1 if it is wanted, and
0 if not. An answer of several messages continues the conversation: the assistant's are trained, the others are context.

The engine computes the logprobs of the completion under its loaded weights, and they are recorded with that version. So
the mismatch between engine and trainer stays visible, but the logprobs are not those of the completion's author. A loss
with importance ratios against the author's probabilities cannot work here; KTO's loss needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import ClassVar

from rlsys.agents.tool_calls import with_calls_as_text
from rlsys.agents.workflow import AgentStopped, Session, SingleTurn, Workflow
from rlsys.data.row_adapters import RowProblem, describe_type, message_of, problem_lines
from rlsys.errors import ConfigError, DataError
from rlsys.types import Distribution, Json, Message, Prompt, Task


class Offline(Workflow):
    """An agent for each answer of the row replays it; its reward says whether the answer is wanted."""

    name: ClassVar[str] = "offline"

    answers = "recorded"
    opens_with_prompt = True
    is_light = True

    async def run(self, session: Session) -> None:
        task = session.task
        for column, reward in self._answers_of(task).items():
            agent = session.agent("policy")
            session.reward(reward, agent)
            with suppress(AgentStopped):  # an answer that outgrows the context is trained as far as it goes
                for prompt, reply in exchanges_of(task, column):
                    await agent.recite(prompt, reply, tools=task.tools)

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` for keys that do not apply, `DataError` that lists the rows that cannot be used."""
        name = self.name
        if group_size != 1:
            raise ConfigError(
                f"algorithm.group_size: {group_size} episodes of a row would all be its one recorded completion; set "
                f"it to 1 with rollout.workflow={name}"
            )
        if distribution != Distribution():
            raise ConfigError(
                "rollout.temperature, top_p, top_k, min_p: they change nothing that is recorded, and engines say how "
                "likely tokens are at temperature 1, among all tokens; leave them at their defaults with "
                f"rollout.workflow={name} (eval.temperature is free)"
            )
        problems = [f"row {n}: {problem}" for n, task in enumerate(tasks, 1) if (problem := self._problem_in(task))]
        if problems:
            raise DataError("\n  ".join(problem_lines("data.path", problems, f" by rollout.workflow={name}")))

    def in_evaluation(self) -> Workflow:
        """Return the single-turn workflow: in evaluation the policy samples its reply."""
        return SingleTurn()

    def _answers_of(self, task: Task) -> dict[str, float]:
        """Columns of the answers to replay, with their rewards. Raises `RowProblem`."""
        if {"chosen", "rejected"} <= task.info.keys() and "completion" not in task.info:
            return {"chosen": 1.0, "rejected": 0.0}
        return {_column_of(task, "completion", "messages"): label_of(task)}

    def _problem_in(self, task: Task) -> RowProblem | None:
        try:
            for column in self._answers_of(task):
                list(exchanges_of(task, column))
        except RowProblem as problem:
            return problem
        return None


class Demonstrations(Offline):
    """One agent replays the answers of the row, which are all wanted: `completion`, all messages of the assistant in
    `messages`, or `chosen`. For `algorithm.type: sft`."""

    is_light = True
    name = "demonstrations"

    def _answers_of(self, task: Task) -> dict[str, float]:
        return {_column_of(task, "completion", "messages", "chosen"): 1.0}


def label_of(task: Task) -> float:
    """Read the label: 1.0 for a wanted completion, else 0.0. Raises `RowProblem`."""
    label = task.info.get("label")
    if label is None:
        raise RowProblem(f"no `label`; the row has {_columns_of(task)}")
    if isinstance(label, bool | int | float) and label in (0, 1):
        return float(label)
    raise RowProblem(f"`label` is {label!r}; give true or false")


def exchanges_of(task: Task, column: str) -> Iterator[tuple[Prompt, str]]:
    """Yield each prompt and the assistant's reply to it, in order, of an answer. Raises `RowProblem`.

    `messages` are a whole conversation, any other column continues the prompt.
    """
    answer = task.info.get(column)
    if answer is None:
        raise RowProblem(f"no `{column}`; the row has {_columns_of(task)}")
    if isinstance(answer, str) and column != "messages":
        yield task.prompt, _reply(answer, column)
        return
    if not isinstance(answer, list):
        raise RowProblem(f"`{column}` is {describe_type(answer)}; give text or a list of messages")
    if column == "messages":
        yield from _replies_in((), answer, column)
        return
    if isinstance(task.prompt, str):
        raise RowProblem(f"the `prompt` is text and the `{column}` a list of messages; give both alike")
    yield from _replies_in(task.prompt, answer, column)


def _replies_in(history: tuple[Message, ...], conversation: list[Json], column: str) -> Iterator[tuple[Prompt, str]]:
    messages = [message_of(column, number, message) for number, message in enumerate(conversation, 1)]
    if not messages or messages[-1]["role"] != "assistant":
        raise RowProblem(f"the `{column}` does not end with a message of the assistant; only those are trained")
    for message in messages:
        if message["role"] != "assistant":
            history = (*history, message)
        elif not history:
            raise RowProblem(f"the `{column}` has a message of the assistant that answers none; remove it, or join two")
        else:
            yield history, _reply(with_calls_as_text(message)["content"], column)
            history = ()


def _reply(text: str, column: str) -> str:
    if not text:
        raise RowProblem(f"the `{column}` is empty; there is nothing to learn from it")
    return text


def _column_of(task: Task, *names: str) -> str:
    """Name the first of these columns that the row fills, or the first of all."""
    return next((name for name in names if task.info.get(name) is not None), names[0])


def _columns_of(task: Task) -> str:
    return ", ".join(["prompt", *task.info])
