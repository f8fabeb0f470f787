"""The simulator: what any simulation must satisfy, on small profiles."""

import json
from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from rlsys.config.loader import dump
from rlsys.simulate.profile import Profile
from rlsys.simulate.sim_session import Workload
from rlsys.simulate.simulation import Simulation
from rlsys.weight_sync.links import Link, chain_s, tree_s
from tests.simulate.profiles import small

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_staleness": 1},
    {"max_staleness": 3, "weight_change": "inflight"},
    {"max_staleness": 3, "weight_change": "beside"},
    {"max_staleness": 3, "repack_s": 5.0},
    {"max_staleness": 2, "window": 8},
    {"max_staleness": 1, "turns": {"mean": 3, "sigma": 0.5, "cap": 8}, "environment_s": {"mean": 2.0, "sigma": 1.0}},
    {"max_staleness": 1, "cache_tokens": 8000},
]


def ran(steps: int = 8, **changes: Any) -> Simulation:
    simulation = Simulation(small(**changes), steps)
    simulation.run()
    return simulation


def returned_share(simulation: Simulation) -> float:
    """Share of later turns that went to the replica of the turn before."""
    returned = simulation.rollouts.returned
    return returned[True] / returned.total()


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_token_is_trained_once_within_the_staleness_bound(setting: dict[str, Any]):
    simulation = ran(**setting)
    profile, trained = simulation.profile, simulation.trained_groups
    work = Workload(profile)
    group_ids = [group.group_id for group in trained]
    assert len(group_ids) == len(set(group_ids)) == 8 * profile.groups_per_step
    for group in trained:
        expected = sum(step.num_tokens for e in range(profile.group_size) for step in work.episode(group.group_id, e))
        assert group.num_trained == sum(span.num_tokens for span in group.versions) == expected
    assert simulation.report.staleness_max <= simulation.report.staleness_bound
    assert sum(simulation.report.staleness.values()) == pytest.approx(1.0)
    assert simulation.report.dropped == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_neither_side_does_more_than_it_can(setting: dict[str, Any]):
    profile, report = small(**setting), ran(**setting).report
    decode, train = profile.decode, profile.train
    best = max(
        b / (decode.overhead_s + max(decode.weights_s, b * decode.sequence_s)) for b in range(1, profile.slots + 1)
    )
    assert report.generated_tokens_per_s <= profile.num_replicas * best
    assert report.tokens_per_s <= train.tokens_per_s * profile.train_gpus
    assert 0 <= report.rollouts_idle <= 1
    assert 0 <= report.trainer_idle <= 1
    assert 0 < report.kv_used <= 1
    assert report.step_s >= report.train_s + report.publish_stall_s


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_profile_gives_the_same_line_of_json(setting: dict[str, Any]):
    first, second = (json.dumps(ran(4, **setting).report.as_json()) for _ in range(2))
    assert first == second


def test_another_seed_is_other_work():
    assert ran(4).report.tokens_per_s != ran(4, seed=1).report.tokens_per_s


def test_all_settings_see_the_same_work():
    trained = [{g.group_id: g.num_trained for g in ran(**s).trained_groups} for s in ({}, {"max_staleness": 3})]
    assert trained[0] == trained[1]


def test_work_has_the_mean_and_cap_of_the_profile():
    profile = small(response={"mean": 900, "sigma": 1.0, "cap": 3000})
    lengths = [Workload(profile).episode(group_id, e)[0].num_tokens for group_id in range(2000) for e in range(4)]
    assert sum(lengths) / len(lengths) == pytest.approx(900, rel=0.03)
    assert max(lengths) == 3000


def test_a_table_of_lengths_is_drawn_from_evenly():
    profile = small(response={"table": [10, 20, 400]})
    counts = Counter(Workload(profile).episode(group_id, 0)[0].num_tokens for group_id in range(3000))
    assert counts.keys() == {10, 20, 400}
    assert min(counts.values()) > 900


def test_between_changes_every_group_has_a_single_version():
    simulation = ran(12, max_staleness=3, repack_s=2.0)
    assert all(len(group.versions) == 1 for group in simulation.trained_groups)
    assert simulation.rollouts.num_moved > 0
    held = {r.version for r in simulation.rollouts.replicas}
    by_step = [simulation.trained_groups[i : i + 16] for i in range(0, 192, 16)]
    assert len(held) > 1 or any(len({g.versions[0].version for g in step}) > 1 for step in by_step)


def test_in_flight_a_group_goes_on_under_new_weights():
    simulation = ran(max_staleness=3, weight_change="inflight")
    assert any(len(group.versions) > 1 for group in simulation.trained_groups)


def test_beside_changes_keep_versions_and_raise_throughput():
    cheap: dict[str, Any] = {"max_staleness": 3, "decode": {"weights_s": 1e-4}}  # reading two versions costs nothing
    beside, between = (ran(12, **cheap, weight_change=w, resident_versions=4) for w in ("beside", "between"))
    assert all(len(group.versions) == 1 for group in beside.trained_groups)
    assert beside.report.tokens_per_s > between.report.tokens_per_s


def test_recomputing_keys_and_values_costs_what_keeping_them_does_not():
    kept, recomputed = (
        ran(max_staleness=3, weight_change="inflight", kv_cache=k, prefill_tokens_per_s=2000)
        for k in ("keep", "recompute")
    )
    assert recomputed.report.weights_exposed_s > kept.report.weights_exposed_s


def test_repacking_raises_throughput_and_trains_the_identical_groups():
    profile: dict[str, Any] = {"gpus": 32, "groups_per_step": 48, "max_staleness": 3, "decode": {"sequence_s": 2e-5}}
    gains: list[float] = []
    for seed in range(3):
        off, on = (ran(16, **profile, seed=seed, repack_s=s) for s in (0.0, 2.0))
        assert on.report.moved_groups > 0
        gains.append(on.report.generated_tokens_per_s / off.report.generated_tokens_per_s)
        assert on.report.kv_used > off.report.kv_used
        assert [g.group_id for g in on.trained_groups] == [g.group_id for g in off.trained_groups]
        assert [g.num_trained for g in on.trained_groups] == [g.num_trained for g in off.trained_groups]
    assert fmean(gains) > 1.1 and min(gains) > 1.0, gains


def test_dead_replicas_lose_no_group_and_little_throughput():
    versions: list[list[int]] = []

    def kill(simulation: Simulation) -> None:
        simulation.rollouts.replicas[0].die()
        versions.append([replica.version for replica in simulation.rollouts.replicas[1:]])

    calm = ran(12, max_staleness=2)
    hit = Simulation(small(max_staleness=2, repack_s=3.0), 12, incidents=[(40.0, kill), (90.0, kill), (140.0, kill)])
    hit.run()
    assert len(versions) == 3
    assert [r.name for r in hit.rollouts.ended] == ["rollout-0", "rollout-0.1", "rollout-0.2"]
    assert sorted(g.group_id for g in hit.trained_groups) == sorted(g.group_id for g in calm.trained_groups)
    assert hit.report.dropped == 0
    assert hit.report.staleness_max <= 2
    assert hit.report.tokens_per_s > 0.6 * calm.report.tokens_per_s


def test_turns_routed_one_by_one_avoid_a_dead_replica():
    chat = {"turns": {"mean": 4, "sigma": 0.5}, "environment_s": {"mean": 1.0}, "max_staleness": 1}
    profile = small(**chat, weight_change="inflight", routing="prefix")
    hit = Simulation(profile, 8, incidents=[(15.0, lambda simulation: simulation.rollouts.replicas[1].die())])
    hit.run()
    assert len(hit.rollouts.ended) == 1
    assert len({g.group_id for g in hit.trained_groups}) == 8 * 16


def test_publish_stall_does_not_depend_on_the_replica_count():
    few, many = (ran(4, gpus=gpus, inference_share=share).report for gpus, share in ((8, 0.5), (68, 64 / 68)))
    assert few.publish_stall_s == many.publish_stall_s == pytest.approx(0.2)


def test_broadcast_time_matches_the_model_of_its_links():
    simulation = ran(4, gpus=68, inference_share=64 / 68)
    weights = simulation.profile.weights
    link = Link(weights.link_bytes_per_s, weights.link_latency_s)
    sizes = (simulation.profile.num_relays, weights.num_bytes, simulation.world.num_buckets, link)
    modelled = min(chain_s(*sizes), tree_s(*sizes))
    assert simulation.report.broadcast_s == pytest.approx(modelled, rel=0.2)


@pytest.mark.parametrize("load_s", [0.5, 3.0])
@pytest.mark.parametrize("change", ["between", "inflight", "beside"])
def test_weights_are_fresh_once_the_last_replica_has_loaded_them(change: str, load_s: float) -> None:
    report = ran(12, max_staleness=0, weight_change=change, weights={"load_s": load_s}).report
    assert report.freshness_s == pytest.approx(report.broadcast_s + load_s, rel=0.05), report


def test_a_full_cache_makes_requests_wait_and_loses_no_token():
    wide, tight = ran(), ran(cache_tokens=8000)
    assert tight.report.kv_used > wide.report.kv_used
    assert tight.report.tokens_per_s < wide.report.tokens_per_s


def test_colocated_gpus_take_turns():
    report = ran(colocated=True, switch_s=3.0).report
    assert report.step_s >= report.train_s + 3.0 + report.publish_stall_s
    assert report.staleness == {"0": 1.0}


@pytest.mark.parametrize("change", ["between", "inflight"])
def test_colocated_gpus_run_ahead_and_keep_the_bound(change: str):
    report = ran(24, colocated=True, switch_s=0.4, max_staleness=2, weight_change=change).report
    sampling_s = report.generated_tokens_per_s and report.step_s * (1 - report.rollouts_idle)
    assert report.step_s >= 0.95 * (report.train_s + sampling_s), "no moment is both"
    assert 0 < report.staleness_max <= report.staleness_bound
    assert report.dropped == 0


def test_overlap_hides_the_shorter_of_sampling_and_training():
    even: dict[str, Any] = {"response": {"mean": 400, "sigma": 0.0}, "slots": 4, "train": {"tokens_per_s": 500}}
    sync, run_ahead = (ran(24, **even, max_staleness=s).report for s in (0, 4))
    sampling_s = sync.step_s - sync.train_s
    assert run_ahead.step_s < 1.15 * max(sampling_s, sync.train_s)
    assert run_ahead.step_s < 0.7 * sync.step_s


@pytest.mark.nightly
def test_throughput_is_best_at_the_split_that_llamarl_derives():
    """arXiv:2505.24034: theta* = m_t eta_t / (m_t eta_t + m_g eta_g), the trainer's share, m * eta in GPU-seconds a
    sample. Here a step of decoding costs time in proportion to its requests, so eta_g does not depend on the batch."""
    even: dict[str, Any] = {
        "gpus": 40,
        "groups_per_step": 40,
        "response": {"mean": 400, "sigma": 0.0},
        "decode": {"overhead_s": 0.0, "weights_s": 1e-6, "sequence_s": 0.001, "token_s": 0.0},
        "train": {"fixed_s": 0.0, "tokens_per_s": 500},
        "max_staleness": 6,
    }
    train_s, sample_s = 400 / 500, 400 * 0.001
    best = train_s / (train_s + sample_s)
    found = {share: ran(16, **even, inference_share=share).report.tokens_per_s for share in (0.2, 1 / 3, 0.5)}
    assert max(found, key=lambda share: found[share]) == pytest.approx(1 - best, abs=0.01)
    assert max(found.values()) == pytest.approx(40 * 400 / (train_s + sample_s), rel=0.1)


@pytest.mark.nightly
def test_agentmath_gains_come_in_its_order():
    """arXiv:2512.20745: a step takes 1 with synchronous batches of tool calls, 0.6 with asynchronous requests, 0.32
    with partial rollouts too, 0.22 with prefix-aware routing as well.

    The model gives 1, 0.67, 0.30 and 0.22 for a workload of this kind: 16 turns of 150 tokens, tools of 2 s with a long
    tail. Tools answer in parallel here, so a batch of them costs its slowest; the paper's also queue for a sandbox.
    """
    work: dict[str, Any] = {
        "gpus": 8,
        "inference_share": 0.75,
        "groups_per_step": 24,
        "cache_tokens": 2_000_000,
        "prefill_tokens_per_s": 10_000,
        "decode": {"overhead_s": 0.008, "weights_s": 0.002, "sequence_s": 0.00005, "token_s": 1e-8},
        "response": {"mean": 150, "sigma": 0.8, "cap": 1000},
        "turns": {"mean": 16, "sigma": 0.7, "cap": 64},
        "environment_s": {"mean": 2.0, "sigma": 1.2, "cap": 30},
        "observation_tokens": 100,
        "train": {"tokens_per_s": 8000},
        "weight_change": "inflight",
        "kv_cache": "keep",
    }
    batches = ran(**work, routing="request", tools="together")
    requests = ran(**work, routing="request")
    partial = ran(**work, routing="request", max_staleness=2)
    prefix = ran(**work, routing="prefix", max_staleness=2)
    ratios = [run.report.step_s / batches.report.step_s for run in (requests, partial, prefix)]
    assert 1 > ratios[0] > ratios[1] > ratios[2]
    assert ratios == pytest.approx([0.6, 0.32, 0.22], abs=0.15)
    returned = [returned_share(run) for run in (prefix, partial)]
    assert returned[0] > 0.75 > 0.2 > returned[1]
    assert prefix.report.cached_share > 0.6 > 0.3 > partial.report.cached_share


@pytest.mark.nightly
def test_decoupled_rollouts_keep_environments_busier_than_coupled_ones():
    """arXiv:2509.23866: the same pool of environments is at work 12.2 % of the time under batches of rollouts that wait
    for each other and for the trainer, 67.7 % if each rollout is scheduled by itself and workers change weights one by
    one: 5.5 times as much.

    The model gives 9 %, and 36 % and 46 % at 2 and 4 steps of staleness where replicas change between groups, for 192
    environments that take 3 s a turn with a long tail, 15 turns an episode.
    """
    work: dict[str, Any] = {
        "gpus": 16,
        "gpus_per_node": 8,
        "groups_per_step": 24,
        "group_size": 8,
        "cache_tokens": 2_000_000,
        "prefill_tokens_per_s": 10_000,
        "decode": {"overhead_s": 0.008, "weights_s": 0.002, "sequence_s": 0.00005, "token_s": 1e-8},
        "prompt": {"mean": 2000},
        "response": {"mean": 100, "sigma": 0.8, "cap": 600},
        "turns": {"mean": 15, "sigma": 0.6, "cap": 50},
        "environment_s": {"mean": 3.0, "sigma": 1.0, "cap": 30},
        "environments": 192,
        "observation_tokens": 300,
        "kv_cache": "keep",
    }
    coupled = ran(**work, tools="together").report.environments_busy / 192
    decoupled = [ran(12, **work, max_staleness=s, repack_s=5.0).report.environments_busy / 192 for s in (2, 4)]
    assert coupled == pytest.approx(0.12, abs=0.06)
    assert decoupled[1] > decoupled[0] > 4 * coupled


def test_busy_environments_are_limited_by_their_count():
    chat: dict[str, Any] = {"turns": {"mean": 4}, "environment_s": {"mean": 5.0}, "max_staleness": 2}
    busy = {count: ran(**chat, environments=count).report.environments_busy for count in (4, 16, 10_000)}
    assert busy[4] < 4
    assert busy[4] < busy[16] < busy[10_000]
    assert busy[10_000] == pytest.approx(ran(**chat).report.environments_busy, rel=0.05)


def test_environments_of_a_dead_replica_are_released():
    chat: dict[str, Any] = {"turns": {"mean": 4}, "environment_s": {"mean": 5.0}, "max_staleness": 2}
    kills = [(20.0 * n, lambda simulation: simulation.rollouts.replicas[0].die()) for n in range(1, 4)]
    hit = Simulation(small(**chat, environments=16), 4, incidents=kills)
    hit.run()
    assert hit.rollouts.ended
    assert len({g.group_id for g in hit.trained_groups}) == 4 * 16


def test_a_profile_of_a_file_says_what_it_says(tmp_path: Any):
    path = tmp_path / "mine.yaml"
    path.write_text(dump(small().model_dump(mode="json")))
    assert Profile.load(path) == small()
