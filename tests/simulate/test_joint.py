"""Several policies in one run: each consumes every group at most once, within its bound, and nobody waits for ever."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.errors import NoProgress, RunAborted, TrainingError
from rlsys.testing import FakeWorld, Fault
from tests.simulate.joint import STEPS, Session, random_limits, random_session
from tests.simulate.schedules import Choosy


def worlds(**options: object) -> dict[str, FakeWorld]:
    return {name: FakeWorld(**options) for name in ("proposer", "solver")}  # type: ignore[arg-type]


@given(seed=st.integers(0, 10**6))
def test_each_policy_trains_every_group_once_within_its_bound(seed: int):
    chance = random.Random(seed)
    limits = random_limits(chance)
    stop = (chance.choice(list(limits)), chance.randint(1, STEPS)) if chance.random() < 0.4 else None
    with TemporaryDirectory() as folder:
        sessions = [random_session(chance, Path(folder), limits, dies=stop is None)]
        sessions[0].run(stop=stop)
        if stop is not None:
            sessions.append(random_session(chance, Path(folder), limits))
            sessions[1].run()
    for policy, own in limits.items():
        last = sessions[-1].drivers[policy]
        trained = [group_id for session in sessions for group_id in session.worlds[policy].trained_group_ids]
        issued = set(range(last.queue.ledger.next_group_id))
        dropped = {group_id for session in sessions for group_id, _ in session.diaries[policy].dropped}
        assert len(trained) == len(set(trained)) == own["steps"] * own["groups_per_step"]
        assert issued <= dropped.union(trained), "what is issued is settled"
        assert issued >= set(trained), "drops before a resume or a rollback may not happen again"
        assert not last.queue.ledger.open
        behind = [s for session in sessions for s in session.worlds[policy].staleness]
        assert max(behind) <= last.queue.bound.versions
        assert not any(reason == "stale" for session in sessions for _, reason in session.diaries[policy].dropped)


def test_one_rollout_and_one_score_serve_all_policies(tmp_path: Path):
    session = Session(worlds(), tmp_path)
    assert session.run() == {"proposer": STEPS, "solver": STEPS}
    assert [a.group_id for a in session.pool.assignments] == list(range(3 * STEPS))
    assert session.judges.num_calls == 3 * STEPS


def test_groups_are_sampled_with_the_newest_version_of_each_policy(tmp_path: Path):
    session = Session(worlds(), tmp_path, {"solver": {"groups_per_step": 1, "steps": 3 * STEPS}})
    session.run()
    assert {name: a for a in session.pool.assignments for name, a in a.versions.items()} == {
        "proposer": STEPS - 1,
        "solver": 3 * STEPS - 1,
    }
    assert all(max(world.staleness) == 0 for world in session.worlds.values())


def test_a_group_dropped_by_one_policy_is_trained_by_another(tmp_path: Path):
    limits = {"proposer": {"algorithm": Choosy(is_choosy=True)}}
    session = Session(worlds(), tmp_path, limits)
    session.run()
    proposer, solver = (session.worlds[name].trained_group_ids for name in ("proposer", "solver"))
    assert not [group_id for group_id in proposer if group_id % 5 == 0]
    assert solver == list(range(3 * STEPS)), "its groups are those of a run without drops"
    assert len(proposer) == len(solver)


def test_a_policy_without_turns_in_a_group_drops_it(tmp_path: Path):
    limits = {"solver": {"failed_share": 0.0}}
    session = Session(worlds(), tmp_path, limits, speaks=lambda policy, group_id: group_id % 2 == 0)
    session.run()
    assert {reason for _, reason in session.diaries["solver"].dropped} == {"zero_advantage"}
    assert all(group_id % 2 == 0 for group_id in session.worlds["solver"].trained_group_ids)
    assert session.worlds["proposer"].trained_group_ids == list(range(3 * STEPS))


def test_a_finished_policy_keeps_sampling_for_the_other(tmp_path: Path):
    session = Session(worlds(), tmp_path, {"proposer": {"steps": 2}})
    assert session.run() == {"proposer": 2, "solver": STEPS}
    assert session.pool.assignments[-1].versions["proposer"] == session.pool.loaded["proposer"] == 2, "its last weights"
    assert session.worlds["solver"].trained_group_ids == list(range(3 * STEPS))


def test_relays_of_a_finished_policy_stay_supervised(tmp_path: Path):
    both = {"proposer": FakeWorld(relay_deaths_s=(10.0,)), "solver": FakeWorld()}
    session = Session(both, tmp_path, {"proposer": {"steps": 2}})
    session.run()
    assert session.diaries["proposer"].failed == ["relay-0"]


def test_a_rollout_that_fails_is_made_again_once_for_both(tmp_path: Path):
    session = Session(worlds(rollout_faults={4: Fault.DIES}), tmp_path)
    session.run()
    group_ids = [a.group_id for a in session.pool.assignments]
    assert [group_id for group_id in group_ids if group_ids.count(group_id) > 1] == [4, 4]


def test_a_payload_lost_by_one_policy_is_reissued_for_it(tmp_path: Path):
    both = {"proposer": FakeWorld(), "solver": FakeWorld(payload_losses={"fetch": {1}})}
    session = Session(both, tmp_path)
    session.run()
    assert session.diaries["solver"].reissued == [3, 5]
    assert session.diaries["proposer"].reissued == []
    assert [world.trained_group_ids for world in both.values()] == [list(range(3 * STEPS))] * 2
    group_ids = [a.group_id for a in session.pool.assignments]
    assert sorted(group_id for group_id in group_ids if group_ids.count(group_id) > 1) == [3, 3, 5, 5]


def test_failed_groups_fail_for_all_policies_and_end_the_run(tmp_path: Path):
    faults = dict.fromkeys(range(99), Fault.FAILS)
    with pytest.raises(RunAborted, match="each of the first 16 groups failed"):
        Session(worlds(reward_faults=faults), tmp_path).run()


def test_policies_resume_from_their_own_checkpoint_steps(tmp_path: Path):
    limits = {"proposer": {"checkpoint_every": 3}, "solver": {"checkpoint_every": 2, "groups_per_step": 2}}
    with pytest.raises(TrainingError):
        Session({"proposer": FakeWorld(), "solver": FakeWorld(nan_at=5)}, tmp_path, limits).run()
    resumed = Session(worlds(), tmp_path, limits)
    assert resumed.run() == {"proposer": STEPS, "solver": STEPS}
    assert resumed.worlds["proposer"].trained_group_ids == list(range(4 * 3, 3 * STEPS)), "its last step was saved"
    assert resumed.worlds["solver"].trained_group_ids == list(range(2 * 4, 2 * STEPS))


def test_a_policy_waiting_for_another_is_not_considered_stuck(tmp_path: Path):
    limits = {"proposer": {"no_progress_s": 60.0, "checkpoint_every": 1}, "solver": {"no_progress_s": 60.0}}
    with pytest.raises(TrainingError):
        Session({"proposer": FakeWorld(), "solver": FakeWorld(nan_at=5)}, tmp_path, limits).run()
    slow = {"proposer": FakeWorld(), "solver": FakeWorld(train_s=lambda version: 50.0)}
    resumed = Session(slow, tmp_path, limits)
    assert resumed.run() == {"proposer": STEPS, "solver": STEPS}
    assert len(resumed.worlds["solver"].trained_group_ids) > 4 + len(resumed.worlds["proposer"].trained_group_ids)


def test_a_stuck_run_names_the_policy_a_group_waits_for(tmp_path: Path):
    stuck = {"proposer": FakeWorld(), "solver": FakeWorld(train_s=lambda version: 1e6)}
    with pytest.raises(NoProgress, match=r"group 3: task task-\d, attempt 1, policy solver since"):
        Session(stuck, tmp_path, {"proposer": {"no_progress_s": 60.0}}).run()
