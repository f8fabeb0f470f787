"""Laws of every installed algorithm, for any split of a step and any members of a group."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.corrections import Geometric, OffPolicyMask, Policies, SequenceTis, Tis
from algorithms.dpo import DPO
from algorithms.grpo import GRPO
from algorithms.policy_gradient import ClippedSurrogate, PolicyGradient
from algorithms.ppo import PPO
from algorithms.reinforce_pp import ReinforcePP
from rlsys.algorithm import Algorithm, Column, LossInputs, LossOutput, TrajectoryAdvantage
from rlsys.batch.packing import SampleRef, num_trained, plan_batch
from rlsys.batch.samples import Sample
from rlsys.batch.tensors import MicroBatch
from rlsys.config.plugins import ALGORITHMS
from rlsys.errors import ConfigError
from rlsys.monitoring.metric_catalog import undocumented_names
from rlsys.types import OK, TRUNCATED, EpisodeMeta, Group, Outcome, SampleMeta, TrajectoryMeta, VersionSpan, failed
from tests.groups import group
from tests.tokens import F64, OneRank, column
from workers.train.step_data import check_skipped

DEFAULTS: dict[str, Algorithm] = {name: ALGORITHMS.find(name)() for name in ALGORITHMS.entry_points()}
FAMILY = {name: algorithm for name, algorithm in DEFAULTS.items() if isinstance(algorithm, PolicyGradient)}
MASKS = (Geometric(low=0.5, high=2.0), OffPolicyMask(delta=0.1))
VARIANTS: dict[str, Algorithm] = {
    **DEFAULTS,
    **{f"{name} with kl": replace(algorithm, kl_coef=0.1) for name, algorithm in FAMILY.items()},
    **{
        f"{name} with entropy": replace(algorithm, entropy_coef=0.1, top_entropy_quantile=0.6)
        for name, algorithm in FAMILY.items()
    },
    **{f"{name} with masks": replace(algorithm, correction=MASKS) for name, algorithm in FAMILY.items()},
    **{
        f"{name}, {label}": replace(algorithm, **fields)
        for name, algorithm in FAMILY.items()
        if isinstance(algorithm, ClippedSurrogate)
        for label, fields in (
            ("weighted by sequence", {"correction": (SequenceTis(),)}),
            ("interpolated", {"correction": (Tis(),), "proximal": "interpolated", "dual_clip": 5.0}),
        )
    },
    **{
        f"{name} over {over}": replace(algorithm, over=over, budget=7)
        for name, algorithm in FAMILY.items()
        if name == "grpo"
        for over in ("sequences", "budget", "agents")
    },
}
every = pytest.mark.parametrize("algorithm", [*VARIANTS.values()], ids=[*VARIANTS])
every_default = pytest.mark.parametrize("algorithm", [*DEFAULTS.values()], ids=[*DEFAULTS])


# ---------------------------------------------------------------------------------------------------- a step by hand


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of one sample."""

    logprobs: list[float]
    behavior: list[float]
    proximal: list[float]
    staleness: list[int]
    entropies: list[float]
    columns: Mapping[Column, list[float]]


def tokens_of(place: tuple[int, int, int, int], length: int) -> Tokens:
    """Those of one place in the step, always the same."""
    rng = random.Random(repr(place))

    def near(values: list[float], spread: float) -> list[float]:
        return [value + rng.gauss(0, spread) for value in values]

    behavior = [-rng.uniform(0.1, 4) for _ in range(length)]
    proximal = near(behavior, 0.3)
    return Tokens(
        logprobs=near(proximal, 0.2),
        behavior=behavior,
        proximal=proximal,
        staleness=[rng.randrange(4) for _ in range(length)],
        entropies=[rng.uniform(0, 3) for _ in range(length)],
        columns={
            Column.REFERENCE_LOGPROBS: near(behavior, 0.5),
            Column.REFERENCE_MISMATCHED: near(behavior, 1.0),
            Column.POLICY_MISMATCHED: near(behavior, 1.0),
            Column.VALUES: near([0.5] * length, 0.3),
        },
    )


def trajectory(rng: random.Random, agent: str, outcome: Outcome, reward: float | None) -> TrajectoryMeta:
    lengths = [rng.randint(1, 9) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
    samples = tuple(SampleMeta(2, n + 1, n, prompt_key=rng.randrange(2)) for n in lengths)
    return TrajectoryMeta(agent, None if agent == "lead" else 0, outcome, reward, samples)


def some_group(group_id: int) -> Group:
    """Leads and subagents; some failed, some cut, some that said nothing, some of several samples."""
    rng = random.Random(group_id)
    episodes = []
    for _ in range(rng.randint(3, 6)):
        outcome = rng.choice([OK, OK, OK, OK, TRUNCATED, failed("tool hung")])
        root = trajectory(rng, "lead", outcome, rng.choice([0.0, 0.25, 1.0]))
        subs = [trajectory(rng, "sub", OK, rng.choice([None, 0.5])) for _ in range(rng.randrange(3))]
        episodes.append(EpisodeMeta((root, *subs)))
    return group(group_id, episodes=episodes)


def inputs(refs: Sequence[SampleRef], step: Sequence[Group], algorithm: Algorithm) -> LossInputs:
    """As `token_advantages` sees a micro-batch, and with the proximal logprobs that `loss` sees."""
    found = [tokens_at(ref, step) for ref in refs]
    lengths = [len(tokens.behavior) for tokens in found]
    batch = LossInputs(
        behavior_logprobs_N=column([x for tokens in found for x in tokens.behavior]),
        proximal_logprobs_N=column([math.nan] * sum(lengths)),
        advantages_N=column([ref.advantage for ref, n in zip(refs, lengths, strict=True) for _ in range(n)]),
        staleness_N=torch.tensor([x for tokens in found for x in tokens.staleness], dtype=torch.int64),
        lengths_S=torch.tensor(lengths, dtype=torch.int64),
        groups_S=torch.tensor([ref.group for ref in refs], dtype=torch.int64),
        columns_N={s: column([x for tokens in found for x in tokens.columns[s]]) for s in algorithm.columns},
    )
    shaped = algorithm.token_advantages(batch)
    return replace(
        batch,
        advantages_N=shaped.advantages_N,
        returns_N=shaped.returns_N,
        proximal_logprobs_N=column([x for tokens in found for x in tokens.proximal]),
        entropies_N=column([x for tokens in found for x in tokens.entropies]),
    )


def tokens_at(ref: SampleRef, step: Sequence[Group]) -> Tokens:
    meta = step[ref.group].episodes[ref.episode].trajectories[ref.trajectory].samples[ref.sample]
    return tokens_of((step[ref.group].group_id, ref.episode, ref.trajectory, ref.sample), meta.num_trained)


@dataclass
class Meeting:
    """Ranks in one process: first each brings what it has, then each gets what all have brought."""

    brought: list[Tensor] = field(default_factory=list)

    def sum(self, tensor: Tensor) -> Tensor:
        self.brought.append(tensor.clone())
        return tensor

    def gather(self, values_N: Tensor) -> Tensor:
        return self.sum(values_N)


class Met:
    def __init__(self, meetings: Sequence[Meeting]) -> None:
        self._brought = zip(*(meeting.brought for meeting in meetings), strict=True)

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(next(self._brought)).sum(0)

    def gather(self, values_N: Tensor) -> Tensor:
        return torch.cat(next(self._brought))


def facts_of(algorithm: Algorithm, refs_by_rank: Sequence[Sequence[SampleRef]], step: Sequence[Group]) -> Mapping:
    if not algorithm.has_step_statistics:
        return {}
    joined = [inputs(refs, step, algorithm) for refs in refs_by_rank]
    meetings = [Meeting() for _ in joined]
    for meeting, own in zip(meetings, joined, strict=True):
        algorithm.step_statistics(own, meeting)
    facts = [algorithm.step_statistics(own, Met(meetings)) for own in joined]
    assert all(others == facts[0] for others in facts)
    return facts[0]


def trained(
    algorithm: Algorithm, step: Sequence[Group], num_ranks: int, max_tokens: int, *, skips_zeros: bool | None = None
) -> tuple[float, dict[tuple[int, ...], list[float]], dict[str, float]]:
    """The loss of a step in one update, its gradient by the logprobs of each sample, and the sums of its metrics."""
    assigned = algorithm.finalize_advantages(step, {}).groups
    plan = plan_batch(
        step,
        assigned,
        algorithm.aggregation.with_budget(7),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        skips_zeros=algorithm.skips_zero_advantages if skips_zeros is None else skips_zeros,
    )
    ranks = [[part for part in rank.micro_batches if part.weight] for rank in plan]
    facts = facts_of(algorithm, [[ref for part in rank for ref in part.samples] for rank in ranks], step)
    batches = [(part.samples, inputs(part.samples, step, algorithm)) for rank in ranks for part in rank]
    every_N = torch.cat([batch.advantages_N for _, batch in batches])
    mean, std = every_N.mean(), every_N.std(correction=0)
    total, gradients, metrics = 0.0, {}, {}
    for refs, batch in batches:
        advantages_N = (batch.advantages_N - mean) / (std + 1e-8) if algorithm.whitens else batch.advantages_N
        logprobs_N = column([x for ref in refs for x in tokens_at(ref, step).logprobs]).requires_grad_()
        output = algorithm.loss(logprobs_N, replace(batch, advantages_N=advantages_N, facts=facts))
        weights_N = column([ref.token_weight for ref in refs]).repeat_interleave(batch.lengths_S)
        loss = (output.loss_N * weights_N).sum()
        (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
        total += loss.item()
        for ref, own in zip(refs, gradient_N.split(batch.lengths_S.tolist()), strict=True):
            gradients[ref.group, ref.episode, ref.trajectory, ref.sample] = own.tolist()
        for name, value_N in output.metrics_N.items():
            assert not value_N.requires_grad
            metrics[name] = metrics.get(name, 0.0) + value_N.double().sum().item()
    return total, gradients, metrics


# --------------------------------------------------------------------------------------------------------------- laws


@every
@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 1000), num_ranks=st.integers(1, 3), max_tokens=st.integers(1, 60))
def test_splits_into_micro_batches_and_ranks_change_no_result(
    algorithm: Algorithm, seed: int, num_ranks: int, max_tokens: int
) -> None:
    step = [some_group(1000 * seed + i) for i in range(3)]
    if not sum(num_trained(*pair) for pair in zip(step, algorithm.finalize_advantages(step, {}).groups, strict=True)):
        return
    loss, gradients, metrics = trained(algorithm, step, 1, 10_000)
    split_loss, split_gradients, split_metrics = trained(algorithm, step, num_ranks, max_tokens)
    assert split_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert split_gradients.keys() == gradients.keys()
    for place, gradient in gradients.items():
        assert split_gradients[place] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    assert split_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    assert undocumented_names(metrics) == []


def without_advantage(step: Sequence[Group], which: int) -> list[Group]:
    """The step with equal rewards in the groups from `which` on."""

    def equal(scored: Group) -> Group:
        episodes = [
            replace(episode, trajectories=tuple(replace(t, reward=t.reward and 1.0) for t in episode.trajectories))
            for episode in scored.episodes
        ]
        return replace(scored, episodes=tuple(episodes))

    return [equal(scored) if i >= which else scored for i, scored in enumerate(step)]


SKIPPING = {name: algorithm for name, algorithm in VARIANTS.items() if algorithm.skips_zero_advantages}


@pytest.mark.parametrize("algorithm", [*SKIPPING.values()], ids=[*SKIPPING])
@settings(max_examples=settings().max_examples // 4)
@given(seed=st.integers(0, 1000), num_ranks=st.integers(1, 3), max_tokens=st.integers(1, 60))
def test_skipped_samples_change_neither_loss_nor_gradient(
    algorithm: Algorithm, seed: int, num_ranks: int, max_tokens: int
) -> None:
    step = without_advantage([some_group(1000 * seed + i) for i in range(3)], 1)
    if not sum(num_trained(*pair) for pair in zip(step, algorithm.finalize_advantages(step, {}).groups, strict=True)):
        return
    loss, gradients, _ = trained(algorithm, step, 1, 10_000, skips_zeros=False)
    skipped_loss, skipped_gradients, _ = trained(algorithm, step, num_ranks, max_tokens)
    assert skipped_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for place, gradient in gradients.items():
        if place in skipped_gradients:
            assert skipped_gradients[place] == pytest.approx(gradient, rel=1e-9, abs=1e-12)
        else:
            assert not any(gradient)


def test_nothing_is_skipped_where_zero_advantages_are_trained_or_measured() -> None:
    skipping = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "longcat", "eapo", "mrt"}
    assert {name for name, algorithm in DEFAULTS.items() if algorithm.skips_zero_advantages} == skipping
    assert not any(algorithm.skips_zero_advantages for name, algorithm in VARIANTS.items() if name.endswith("with kl"))

    @dataclass(frozen=True, kw_only=True)
    class WithEntropyBonus(GRPO):
        def loss(self, logprobs_N: Tensor, batch: LossInputs) -> LossOutput:
            own = super().loss(logprobs_N, batch)
            return replace(own, loss_N=own.loss_N + 0.01 * logprobs_N)

    @dataclass(frozen=True, kw_only=True)
    class WithOwnKl(GRPO):
        def kl(self, policies: Policies) -> LossOutput:
            return LossOutput(0.01 * policies.current_N)

    assert not WithEntropyBonus().skips_zero_advantages
    assert not WithOwnKl().skips_zero_advantages


def test_a_loss_that_contradicts_the_skipping_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithTerm(GRPO):
        def surrogate(self, policies: Policies) -> LossOutput:
            own = super().surrogate(policies)
            return replace(own, loss_N=own.loss_N + 0.01 * policies.current_N)

    for algorithm in VARIANTS.values():
        check_skipped(algorithm)
    with pytest.raises(ConfigError, match="WithTerm: its loss has a gradient where advantages are 0"):
        check_skipped(WithTerm())


@every
def test_advantages_and_losses_wait_for_no_value_of_the_device(algorithm: Algorithm) -> None:
    """Tensors of the meta device have no values: what reads one fails."""
    step = [some_group(i) for i in range(3)]
    assigned = algorithm.finalize_advantages(step, {}).groups
    plan = plan_batch(step, assigned, algorithm.aggregation.with_budget(7), num_ranks=1, max_tokens=10_000)
    refs = [ref for part in plan[0].micro_batches for ref in part.samples]
    facts, real = facts_of(algorithm, [refs], step), inputs(refs, step, algorithm)
    tensors = {f.name: getattr(real, f.name) for f in fields(real) if isinstance(getattr(real, f.name), Tensor)}
    batch = replace(
        real,
        **{name: tensor.to("meta") for name, tensor in tensors.items()},
        columns_N={kind: column_N.to("meta") for kind, column_N in real.columns_N.items()},
        facts=facts,
    )
    shaped = algorithm.token_advantages(batch)
    batch = replace(batch, advantages_N=shaped.advantages_N, returns_N=shaped.returns_N)
    logprobs_N = torch.empty_like(batch.advantages_N, requires_grad=True)
    algorithm.loss(logprobs_N, batch).loss_N.sum().backward()
    if Column.VALUES in algorithm.columns:
        algorithm.value_loss(logprobs_N, batch).loss_N.sum().backward()


def placed(algorithm: Algorithm, scored: Group) -> dict[tuple[int, int, int | None], float]:
    return {(a.episode, a.trajectory, a.sample): a.advantage for a in algorithm.advantages(scored)}


@every_default
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 1000), rng=st.randoms(use_true_random=False))
def test_the_order_of_a_steps_groups_does_not_matter(algorithm: Algorithm, seed: int, rng: random.Random) -> None:
    past = {"policy/entropy": rng.choice([0.0, 0.3, 9.0])}
    step = [some_group(1000 * seed + i) for i in range(4)]
    order = [*range(4)]
    rng.shuffle(order)
    straight = algorithm.finalize_advantages(step, past)
    shuffled = algorithm.finalize_advantages([step[i] for i in order], past)
    assert shuffled.groups == tuple(straight.groups[i] for i in order)
    assert shuffled.metrics == straight.metrics


@every_default
@given(group_id=st.integers(0, 10_000), rng=st.randoms(use_true_random=False))
def test_the_order_of_a_groups_members_does_not_matter(algorithm: Algorithm, group_id: int, rng: random.Random) -> None:
    scored = some_group(group_id)
    order = [*range(len(scored.episodes))]
    rng.shuffle(order)
    shuffled = placed(algorithm, replace(scored, episodes=tuple(scored.episodes[i] for i in order)))
    straight = placed(algorithm, scored)
    assert {(order[e], t, s): value for (e, t, s), value in shuffled.items()} == pytest.approx(straight, abs=1e-12)


@every_default
@given(group_id=st.integers(0, 10_000), frozen=st.sampled_from([("sub",), ("lead",), ("sub", "lead"), ("other",)]))
def test_frozen_agents_are_not_trained_and_change_nothing_for_others(
    algorithm: Algorithm, group_id: int, frozen: tuple[str, ...]
) -> None:
    scored = some_group(group_id)
    partly = replace(algorithm, frozen_agents=frozen)

    def agent(a: TrajectoryAdvantage) -> str:
        return scored.episodes[a.episode].trajectories[a.trajectory].agent

    expected = tuple(a for a in algorithm.advantages(scored) if agent(a) not in frozen)
    assert partly.assign(scored) == expected
    (settled,) = partly.finalize_advantages([scored], {}).groups
    assert all(agent(a) not in frozen for a in settled)
    if algorithm.assign(scored) == expected:
        assert (settled,) == algorithm.finalize_advantages([scored], {}).groups


@every
def test_tokens_that_the_policy_did_not_sample_have_no_influence(algorithm: Algorithm) -> None:
    """Two turns with a tool's answer between them, whatever the columns say about that answer, and without it."""
    prompt, versions = (1, 2), (VersionSpan(0, 4),)
    logprobs = (-1.0, -0.5, -2.0, -0.1)
    plain = Sample(prompt, (3, 4, 5, 6), (True,) * 4, logprobs, versions)
    is_trained = (True, True, False, False, False, True, True)
    observed = Sample(prompt, (3, 4, 9, 9, 9, 5, 6), is_trained, (-1.0, -0.5, 0, 0, 0, -2.0, -0.1), versions)
    trained_column = (-0.8, -0.6, -1.5, -0.2)
    beside_column = (-0.8, -0.6, 7.0, -7.0, 99.0, -1.5, -0.2)
    results = []
    for sample, values in ((plain, trained_column), (observed, beside_column)):
        batch = MicroBatch.of([sample], [0.7], {kind: [values] for kind in algorithm.columns}, token_weights=[1.0])
        seen = batch.loss_inputs(2, torch.full((4,), math.nan))
        shaped = algorithm.token_advantages(seen)
        proximal_N = torch.tensor([-0.9, -0.6, -1.9, -0.1])
        entropies_N = torch.tensor([0.5, 2.0, 1.0, 0.1])
        seen = replace(seen, advantages_N=shaped.advantages_N, proximal_logprobs_N=proximal_N, entropies_N=entropies_N)
        seen = replace(seen, facts=algorithm.step_statistics(seen, OneRank()) if algorithm.has_step_statistics else {})
        results.append([shaped.advantages_N, algorithm.loss(torch.tensor(logprobs), seen).loss_N])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("algorithm", [*FAMILY.values()], ids=[*FAMILY])
@pytest.mark.parametrize("correction", ["none", "default"])
def test_on_policy_the_gradient_is_that_of_reinforce(algorithm: PolicyGradient, correction: str) -> None:
    if correction == "none":
        algorithm = replace(algorithm, correction=())
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=F64).requires_grad_()
    logprobs_N = logits.log_softmax(-1)[:, 3]
    held = logprobs_N.detach()
    batch = LossInputs(
        behavior_logprobs_N=held,
        proximal_logprobs_N=held,
        advantages_N=column([1.0, -2.0, 0.5, 0.0, 3.0, -0.1]),
        staleness_N=torch.zeros(6, dtype=torch.int64),
        lengths_S=torch.tensor([2, 4]),
        groups_S=torch.tensor([0, 1]),
        facts={},
    )
    batch = replace(batch, facts=algorithm.step_statistics(batch, OneRank()) if algorithm.has_step_statistics else {})
    (actual,) = torch.autograd.grad(algorithm.loss(logprobs_N, batch).loss_N.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(batch.advantages_N * logprobs_N).sum(), logits)
    torch.testing.assert_close(actual, expected)


@every
def test_extreme_ratios_stay_finite(algorithm: Algorithm) -> None:
    logprobs_N = torch.tensor([0.0, -300.0, -1.0], requires_grad=True)
    other_N = torch.tensor([-300.0, 0.0, -1.0])
    batch = LossInputs(
        behavior_logprobs_N=other_N,
        proximal_logprobs_N=logprobs_N.detach(),
        advantages_N=torch.tensor([-1.0, 1.0, 0.0]),
        staleness_N=torch.tensor([0, 9, 1]),
        lengths_S=torch.tensor([1, 1, 1]),
        groups_S=torch.tensor([0, 0, 1]),
        columns_N=dict.fromkeys(algorithm.columns, other_N),
        entropies_N=torch.tensor([0.0, 9.0, 1.0]),
    )
    batch = replace(batch, facts=algorithm.step_statistics(batch, OneRank()) if algorithm.has_step_statistics else {})
    loss = algorithm.loss(logprobs_N, batch).loss_N.sum()
    loss.backward()
    assert loss.isfinite()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.isfinite().all()
    assert algorithm.token_advantages(batch).advantages_N.isfinite().all()


# ---------------------------------------------------------------------------------------------------------- bad input


def member(reward: float | None, outcome: Outcome = OK, num_samples: int = 1) -> EpisodeMeta:
    return EpisodeMeta((TrajectoryMeta("lead", None, outcome, reward, (SampleMeta(2, 3, 3, 0),) * num_samples),))


@dataclass(frozen=True, kw_only=True)
class ToAll(Algorithm):
    """Gives every trajectory that there is an advantage, asked for or not, and those of `more`."""

    more: tuple[TrajectoryAdvantage, ...] = ()

    def advantages(self, group: Group) -> Iterator[TrajectoryAdvantage]:
        for e, episode in enumerate(group.episodes):
            yield from (TrajectoryAdvantage(e, t, 1.0) for t in range(len(episode.trajectories)))
        yield from self.more


def test_trajectories_of_failures_or_other_policies_are_never_trained() -> None:
    rng = random.Random(1)
    lead, broken, other = (trajectory(rng, name, OK, 1.0) for name in ("lead", "broken", "other"))
    members = EpisodeMeta((lead, replace(broken, outcome=failed("gone")), replace(other, policy="another")))
    lost = EpisodeMeta((replace(lead, outcome=failed("gone")),))
    assert ToAll().assign(group(0, episodes=[members, lost])) == (TrajectoryAdvantage(0, 0, 1.0),)


@pytest.mark.parametrize(("e", "t"), [(0, 1), (2, 0), (-1, 0)])
def test_an_advantage_for_a_missing_trajectory_names_the_algorithm(e: int, t: int) -> None:
    with pytest.raises(ConfigError, match=f"ToAll .* trajectory {t} of episode {e}, which group 7"):
        ToAll(more=(TrajectoryAdvantage(e, t, 1.0),)).assign(group(7))


def assigned_to(algorithm: Algorithm, *members: EpisodeMeta) -> list[TrajectoryAdvantage]:
    scored = group(0, episodes=members)
    algorithm.can_learn_from(scored)
    assigned = list(algorithm.advantages(scored))
    assert all(math.isfinite(a.advantage) for a in assigned)
    return assigned


@every_default
def test_groups_of_one_train_only_algorithms_without_comparison(algorithm: Algorithm) -> None:
    assert len(assigned_to(algorithm, member(1.0))) == (0 if _compares(algorithm) else 1)
    assert len(assigned_to(algorithm, member(1.0), member(None, failed("timeout")))) == (
        0 if _compares(algorithm) else 1
    )


@every_default
def test_equal_rewards_give_no_advantage_to_any_of_those_compared(algorithm: Algorithm) -> None:
    assigned = assigned_to(algorithm, member(0.1), member(0.1), member(0.1))
    assert len(assigned) == (0 if isinstance(algorithm, DPO) else 3)
    if _compares(algorithm):
        assert not any(a.advantage for a in assigned)


@every_default
def test_a_group_of_failed_or_unscored_episodes_assigns_nothing(algorithm: Algorithm) -> None:
    broken = failed("judge hung")
    assert assigned_to(algorithm, member(1.0, broken), member(0.0, broken)) == []
    num_unscored = 0 if algorithm.uses_rewards else 2
    assert len(assigned_to(algorithm, member(None), member(None))) == num_unscored
    assert len(assigned_to(algorithm, member(math.nan), member(math.nan))) == num_unscored


@every_default
def test_an_empty_completion_counts_and_trains_nothing(algorithm: Algorithm) -> None:
    members = (member(1.0), member(0.0, num_samples=0), member(0.5))
    assigned = assigned_to(algorithm, *members)
    scored = group(0, episodes=members)
    plan = plan_batch([scored], [assigned], algorithm.aggregation.with_budget(7), num_ranks=1, max_tokens=100)
    episodes = {ref.episode for part in plan[0].updates[0] for ref in part.samples}
    assert episodes == {0, 2}
    if _compares(algorithm):
        by_episode = {a.episode: a.advantage for a in assigned}
        assert by_episode[0] > by_episode[2]
        # An empty answer has no tokens to make less likely, and is of no pair.
        assert by_episode[2] == pytest.approx(-1.0 if isinstance(algorithm, DPO) else 0.0, abs=1e-12)


@every_default
def test_truncated_completions_are_compared_and_trained_unless_masked(algorithm: Algorithm) -> None:
    assigned = {a.episode: a.advantage for a in assigned_to(algorithm, member(1.0), member(0.0, TRUNCATED))}
    whole = {a.episode: a.advantage for a in assigned_to(algorithm, member(1.0), member(0.0))}
    is_masked = isinstance(algorithm, PolicyGradient) and algorithm.mask_truncated
    assert assigned == ({0: whole[0]} if is_masked else whole)


@every_default
def test_every_algorithm_says_why_its_staleness_is_safe(algorithm: Algorithm) -> None:
    said = type(algorithm).max_safe_staleness.__doc__ or ""
    assert len(said) > 80
    assert algorithm.max_safe_staleness is None or algorithm.max_safe_staleness >= 0


def _compares(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, PolicyGradient | DPO) and not isinstance(algorithm, PPO | ReinforcePP)
