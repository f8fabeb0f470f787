"""`examples/two_policies`: prompts and replies, rewards, and the report's figures."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from examples.two_policies.play import Digits
from examples.two_policies.prepare import ASKED, proposal, solution
from examples.two_policies.report import share_of
from rlsys.config import Config
from rlsys.testing import ScriptedPolicy, play_scripted
from rlsys.types import Episode, Task, Trajectory

TASK = Task(id="ask-0", prompt=ASKED)
BINDINGS = {"proposer": "proposer", "solver": "solver"}


def episode(proposed: str, solved: str) -> Episode:
    policies = {"proposer": ScriptedPolicy(lambda said: proposed), "solver": ScriptedPolicy(lambda said: solved)}
    return play_scripted(Digits(attempts=2), TASK, policies, bindings=BINDINGS)


def test_each_agent_uses_its_own_policy_and_exchanges_text():
    found = episode("385120", "012358")
    assert [(t.agent, t.policy, t.reward) for t in found.trajectories] == [
        ("proposer", "proposer", 0.0),  # every solver is right: too easy
        ("solver", "solver", 1.0),
        ("solver", "solver", 1.0),
    ]
    assert found.trajectories[1].turns[0].prompt_ids == tuple(map(ord, "385120>"))


@pytest.mark.parametrize("reply", ["", "38512", "38512a", "3851203"])
def test_an_invalid_proposal_costs_the_proposer_and_gets_no_solver(reply: str):
    (proposer,) = episode(reply, "").trajectories
    assert proposer.reward == -1.0


def test_the_report_counts_proper_tasks_and_right_answers():
    share = share_of(
        [episode("385120", "012358"), episode("385120", "1"), episode("111111", "111111"), episode("", "")]
    )
    assert (share.proper, share.right) == (0.5, 0.5)


def test_a_proposer_without_a_turn_proposed_nothing():
    silent = Episode((Trajectory("proposer", ()), *episode("385120", "012358").trajectories[1:]))
    assert share_of([silent, episode("385120", "012358")]).proper == 0.5


def test_what_is_imitated_fits_the_task():
    rng = Random(0)
    proposals = [proposal(rng)[0][1] for _ in range(2000)]
    proper = [said for said in proposals if len(said) == 6 and len({*said}) > 1]
    assert 0.2 < len(proper) / len(proposals) < 0.3
    right = [said == "".join(sorted(prompt[:-1])) for prompt, said in (solution(rng)[0] for _ in range(2000))]
    assert 0.45 < sum(right) / len(right) < 0.6


def test_the_configuration_binds_each_agent_to_its_own_policy():
    config = Config.load(Path("examples/two_policies/run.yaml"))
    assert list(config.trained_policies) == ["solver", "proposer"]
    assert config.of("proposer").model.path.endswith("proposer")
