"""Workflow of thinking in segments, with probes of how far each has come (MRT, arXiv:2503.07572).

    reply      <think> segment 1 | segment 2 | segment 3 </think> the answer
    probes    ^                  ^           ^    at each cut: the policy stops thinking there, and answers at once

A probe is a fork of the context at its cut. The reward functions judge its answer as they judge that of the reply; the
algorithm `mrt` rewards a segment for the difference between the probes at its ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import PositiveInt

from rlsys.agents.agent import Context
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.types import POLICY, Prompt
from rlsys.util.number_ranges import Count, CountFrom0

PROBE = "probe"
"""Name of the agents that answer at a cut."""


@dataclass(frozen=True, kw_only=True)
class Segments(Workflow):
    """One reply, thought in segments on its own tokens, then its answer. Probes answer at every cut.

    The thinking ends with the text `end`, or after `max_segments`. The answer is a turn of its own, after the text
    `cue`, and is what the reward functions read. A policy that ends its reply while it thinks has answered there: then
    the last segment is read, and no later probe is made.
    """

    segment_tokens: PositiveInt = 256
    """Tokens of a segment."""
    max_segments: Count = 8
    """Segments of a reply."""
    probes: CountFrom0 = 1
    """Probes at each cut, also at that before the first segment. 0 in evaluation."""
    end: str = "</think>"
    """Text that ends the thinking. It is added if the policy has not said it."""
    cue: str = "\n\n"
    """Text between `end` and the answer."""

    opens_with_prompt = True
    is_light = True

    async def run(self, session: Session) -> None:
        agent, prompt = session.agent(POLICY), session.task.prompt
        cuts = [(Context(), "")]
        thought = await agent.chat(prompt, max_new_tokens=self.segment_tokens, stop=(self.end,))
        while not agent.has_ended_reply:
            cuts.append((agent.context, thought))
            if self.end in thought or len(cuts) > self.max_segments:
                break
            thought += await agent.resume(max_new_tokens=self.segment_tokens, stop=(self.end,))
        if not agent.has_ended_reply:
            await agent.resume(self._closing(thought))
        forks = [(agent.fork(PROBE, at=cut), thought) for cut, thought in cuts for _ in range(self.probes)]
        await session.gather(*(self._answer_now(fork, prompt, thought) for fork, thought in forks))

    def in_evaluation(self) -> Segments:
        return replace(self, probes=0)

    async def _answer_now(self, fork: Agent, prompt: Prompt, thought: str) -> None:
        fork.is_judged = True
        if fork.context.ids:
            await fork.resume(self._closing(thought))
        else:
            await fork.chat(prompt, begin=self._closing(thought))

    def _closing(self, thought: str) -> str:
        """Text between a thought and the answer."""
        return self.cue if self.end in thought else self.end + self.cue
