"""Offline training: the workflow `offline`, which reads completions from the data and samples nothing.

    {"prompt": "385120>", "completion": "012358", "label": true}
    {"prompt": [{"role": "user", "content": "2+3?"}], "completion": [{"role": "assistant", "content": "6"}], "label": 0}

Rows are TRL's unpaired preferences: `label` marks whether the completion is wanted, and is the reward, 1 or 0. A
completion of several messages continues the conversation: the assistant's messages are trained, the others are context.

The engine computes the logprobs of the completion under its loaded weights, and they are recorded with that version. So
the mismatch between engine and trainer stays visible, but the logprobs are not those of the completion's author. A loss
with importance ratios against the author's probabilities cannot work here; KTO's loss needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from rlsys.agents.tool_calls import with_calls_as_text
from rlsys.agents.workflow import Session, SingleTurn, Workflow
from rlsys.data.row_adapters import RowProblem, describe_type, message_of, problem_lines
from rlsys.errors import ConfigError, DataError
from rlsys.types import Distribution, Json, Message, Prompt, Task


class Offline(Workflow):
    """One agent replays the row's `completion`; its reward is the row's `label`."""

    has_labels: ClassVar[bool] = True

    answers = "recorded"
    opens_with_prompt = True
    is_light = True

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        label = label_of(session.task) if self.has_labels else 1.0
        session.reward(label)  # first, since a conversation that outgrows the context ends below
        for prompt, reply in exchanges_of(session.task):
            await agent.recite(prompt, reply, tools=session.task.tools)

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` for keys that do not apply, `DataError` that lists the rows that cannot be used."""
        name = "offline" if self.has_labels else "demonstrations"
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

    def _problem_in(self, task: Task) -> RowProblem | None:
        try:
            if self.has_labels:
                label_of(task)
            list(exchanges_of(task))
        except RowProblem as problem:
            return problem
        return None


class Demonstrations(Offline):
    """One agent replays the answers of the row, which are all wanted: `completion`, or all messages of the assistant in
    `messages`. For `algorithm.type: sft`."""

    is_light = True
    has_labels = False


def label_of(task: Task) -> float:
    """Read the label: 1.0 for a wanted completion, else 0.0. Raises `RowProblem`."""
    label = task.info.get("label")
    if label is None:
        raise RowProblem(f"no `label`; the row has {_columns_of(task)}")
    if isinstance(label, bool | int | float) and label in (0, 1):
        return float(label)
    raise RowProblem(f"`label` is {label!r}; give true or false")


def exchanges_of(task: Task) -> Iterator[tuple[Prompt, str]]:
    """Yield each prompt and the assistant's reply to it, in order. Raises `RowProblem`.

    Of a row with `messages` and no `completion`, all messages of the assistant are replies.
    """
    completion = task.info.get("completion")
    if completion is None and isinstance(conversation := task.info.get("messages"), list):
        yield from _replies_in((), conversation, "messages")
        return
    if completion is None:
        raise RowProblem(f"no `completion`; the row has {_columns_of(task)}")
    if isinstance(completion, str):
        yield task.prompt, _reply(completion)
        return
    if not isinstance(completion, list):
        raise RowProblem(f"`completion` is {describe_type(completion)}; give text or a list of messages")
    if isinstance(task.prompt, str):
        raise RowProblem("the `prompt` is text and the `completion` a list of messages; give both alike")
    yield from _replies_in(task.prompt, completion, "completion")


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
            yield history, _reply(with_calls_as_text(message)["content"])
            history = ()


def _reply(text: str) -> str:
    if not text:
        raise RowProblem("the `completion` is empty; there is nothing to learn from it")
    return text


def _columns_of(task: Task) -> str:
    return ", ".join(["prompt", *task.info])
