"""A workflow of two agents, for tests of several policies."""

from __future__ import annotations

from rlsys.agents.workflow import Session, Workflow


class AskAndAnswer(Workflow):
    """One agent says something, another answers it; each is scored by the digits it says."""

    async def run(self, session: Session) -> None:
        asker = session.agent("asker")
        asked = await asker.chat(session.task.prompt)
        answerer = session.agent("answerer", parent=asker)
        answered = await answerer.chat(asked[:3] + ">")
        session.reward(float(sum(map(str.isdigit, asked))), asker)
        session.reward(float(sum(map(str.isdigit, answered))), answerer)
