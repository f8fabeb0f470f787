"""Laws of the sampler: one uniform number per (seed, position), tokens by inverse CDF."""

from dataclasses import asdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.types import Distribution
from workers.engines.local.decoder import SamplingOfRows, as_int64, draw, uniform
from workers.model.token_distribution import distribution_logits

torch.set_num_threads(1)

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


@given(seed=st.integers(0, MASK), position=st.integers(0, 1 << 20))
def test_uniform_is_the_top_bits_of_splitmix64(seed: int, position: int) -> None:
    bits = splitmix64((splitmix64(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
    got = uniform(torch.tensor([as_int64(seed)]), torch.tensor([position])).item()
    assert got == (bits >> 40) / (1 << 24)


def test_uniform_numbers_are_evenly_distributed_over_seeds_and_positions() -> None:
    seeds, positions = torch.meshgrid(torch.arange(500), torch.arange(200), indexing="ij")
    numbers = uniform(seeds.flatten(), positions.flatten())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert 55 < chi2 < 160  # 99 degrees of freedom: far outside in one of 100,000 cases


def test_neighbouring_seeds_and_positions_are_uncorrelated() -> None:
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    grid = uniform(seeds.flatten(), positions.flatten()).reshape(300, 300) - 0.5
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs((a * b).mean() * 12) < 0.02


def rows(
    num: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> tuple[SamplingOfRows, torch.Tensor]:
    numbers = uniform(torch.arange(num), torch.zeros(num, dtype=torch.int64))
    values = (torch.full((num,), value) for value in (temperature, top_p, top_k, min_p))
    return SamplingOfRows(*values), numbers


def test_tokens_follow_the_softmax_at_the_given_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    num = 40_000
    tokens, logprobs = draw(logits.expand(num, -1), *rows(num, temperature=2.0))
    expected = (logits / 2).softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / num, expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_top_p_keeps_the_smallest_nucleus_and_renormalises_it() -> None:
    probs = torch.tensor([0.1, 0.5, 0.3, 0.1])
    tokens, logprobs = draw(probs.log().expand(1000, -1), *rows(1000, top_p=0.7))
    assert set(tokens.tolist()) == {1, 2}
    assert torch.allclose(logprobs.exp(), (probs / 0.8)[tokens], atol=1e-6)


def test_top_k_keeps_the_likeliest_tokens_and_those_that_tie_with_them() -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1])
    tokens, logprobs = draw(probs.log().expand(1000, -1), *rows(1000, top_k=2))
    assert set(tokens.tolist()) == {1, 2, 3}
    assert torch.allclose(logprobs.exp(), (probs / 0.8)[tokens], atol=1e-6)


def test_min_p_keeps_tokens_with_a_share_of_the_largest_probability() -> None:
    probs = torch.tensor([0.05, 0.6, 0.25, 0.1])
    tokens, logprobs = draw(probs.log().expand(1000, -1), *rows(1000, min_p=0.3))
    assert set(tokens.tolist()) == {1, 2}
    assert torch.allclose(logprobs.exp(), (probs / 0.85)[tokens], atol=1e-6)


DISTRIBUTIONS = st.builds(
    Distribution,
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 12),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
)


@given(DISTRIBUTIONS, st.integers(0, 2**32 - 1))
def test_the_trainer_computes_the_logprobs_that_tokens_are_sampled_with(distribution: Distribution, seed: int) -> None:
    logits = torch.randn(40, 10, generator=torch.Generator().manual_seed(seed)) * 3
    given_rows, numbers = rows(40, **asdict(distribution))
    tokens, logprobs = draw(logits, given_rows, numbers)
    computed = distribution_logits(logits, tokens, distribution).log_softmax(-1)
    assert torch.equal(computed.gather(1, tokens[:, None])[:, 0], logprobs)


def test_a_sampled_token_is_never_cut_off_by_later_weights() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]], requires_grad=True)
    kept = distribution_logits(logits, torch.tensor([2]), Distribution(top_k=1)).log_softmax(-1)
    kept[0, 2].backward()
    assert kept[0].isfinite().tolist() == [True, False, True]
    assert logits.grad is not None and logits.grad[0, 2] > 0 == logits.grad[0, 1]


def test_temperature_zero_takes_the_likeliest_token_with_logprob_zero() -> None:
    tokens, logprobs = draw(torch.tensor([[0.0, 3.0, 1.0]]).expand(50, -1), *rows(50, temperature=0.0))
    assert tokens.tolist() == [1] * 50
    assert logprobs.tolist() == [0.0] * 50


def test_a_row_is_drawn_alike_beside_rows_with_other_sampling() -> None:
    logits = torch.randn(64, 90, generator=torch.Generator().manual_seed(0)) * 3
    sampling, numbers = rows(64)
    alone = draw(logits, sampling, numbers)
    sampling.temperature_B[1::2], sampling.top_p_B[2::4] = 0.0, 0.5
    mixed = draw(logits, sampling, numbers)
    plain = torch.arange(0, 64, 4)
    assert all(torch.equal(a[plain], b[plain]) for a, b in zip(alone, mixed, strict=True))


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(3, -1)
    edges = torch.tensor([0.0, 0.5, 1 - 2.0**-24])
    tokens, _ = draw(logits, rows(3)[0], edges)
    assert tokens.tolist() == [1, 2, 2]
