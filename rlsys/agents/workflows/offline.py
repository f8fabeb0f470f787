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

from rlsys.agents.workflow import Session, SingleTurn, Workflow
from rlsys.data.row_adapters import RowProblem, listed, message_of, named
from rlsys.errors import ConfigError, DataError
from rlsys.types import Distribution, Message, Prompt, Task


class Offline(Workflow):
    """One agent replays the row's `completion`; its reward is the row's `label`."""

    opens_with_prompt = True

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        session.reward(label_of(session.task))  # first, since a conversation that outgrows the context ends below
        for prompt, reply in exchanges_of(session.task):
            await agent.recite(prompt, reply)

    def check(self, tasks: Sequence[Task], *, group_size: int, distribution: Distribution) -> None:
        """Raise `ConfigError` for keys that do not apply, `DataError` that lists the rows that cannot be used."""
        if group_size != 1:
            raise ConfigError(
                f"algorithm.group_size: {group_size} episodes of a row would all be its one recorded completion; set "
                "it to 1 with rollout.workflow=offline"
            )
        if distribution != Distribution():
            raise ConfigError(
                "rollout.temperature, top_p, top_k, min_p: they change nothing that is recorded, and engines say how "
                "likely tokens are at temperature 1, among all tokens; leave them at their defaults with "
                "rollout.workflow=offline (eval.temperature is free)"
            )
        problems = [f"row {n}: {problem}" for n, task in enumerate(tasks, 1) if (problem := _problem_in(task))]
        if problems:
            raise DataError("\n  ".join(listed("data.path", problems, " by rollout.workflow=offline")))

    def in_evaluation(self) -> Workflow:
        """Return the single-turn workflow: in evaluation the policy samples its reply."""
        return SingleTurn()


def label_of(task: Task) -> float:
    """Read the label: 1.0 for a wanted completion, else 0.0. Raises `RowProblem`."""
    label = task.info.get("label")
    if label is None:
        raise RowProblem(f"no `label`; the row has {_columns_of(task)}")
    if isinstance(label, bool | int | float) and label in (0, 1):
        return float(label)
    raise RowProblem(f"`label` is {label!r}; give true or false")


def exchanges_of(task: Task) -> Iterator[tuple[Prompt, str]]:
    """Yield each prompt and the assistant's reply to it, in order. Raises `RowProblem`."""
    completion = task.info.get("completion")
    if completion is None:
        raise RowProblem(f"no `completion`; the row has {_columns_of(task)}")
    if isinstance(completion, str):
        yield task.prompt, _reply(completion)
        return
    if not isinstance(completion, list):
        raise RowProblem(f"`completion` is {named(completion)}; give text or a list of messages")
    if isinstance(task.prompt, str):
        raise RowProblem("the `prompt` is text and the `completion` a list of messages; give both alike")
    said: tuple[Message, ...] = task.prompt
    messages = [message_of("completion", number, message) for number, message in enumerate(completion, 1)]
    if not messages or messages[-1]["role"] != "assistant":
        raise RowProblem("the `completion` does not end with a message of the assistant; only those are trained")
    for message in messages:
        if message["role"] != "assistant":
            said = (*said, message)
        elif not said:
            raise RowProblem("the `completion` has two messages of the assistant in a row; make them one")
        else:
            yield said, _reply(message["content"])
            said = ()


def _reply(text: str) -> str:
    if not text:
        raise RowProblem("the `completion` is empty; there is nothing to learn from it")
    return text


def _problem_in(task: Task) -> RowProblem | None:
    try:
        label_of(task)
        list(exchanges_of(task))
    except RowProblem as problem:
        return problem
    return None


def _columns_of(task: Task) -> str:
    return ", ".join(["prompt", *task.info])
