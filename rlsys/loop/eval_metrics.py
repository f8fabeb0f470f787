"""Evaluation metrics of a policy: pass@k, mean reward with its confidence interval, lengths and failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, stdev

from rlsys.errors import RlsysError
from rlsys.types import EpisodeMeta, Group, OutcomeKind

Z_95 = 1.96
"""Half width in standard errors of the central 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """Metrics of an evaluation on one data set."""

    num_tasks: int
    """Tasks with at least one scored sample."""
    samples: int
    """Samples per task."""
    mean: float
    """Mean over tasks of the mean reward of their samples (mean@k, k being `samples`)."""
    mean_ci95: float | None
    """Half width of the mean's 95 % confidence interval; None for a single task.

    Normal approximation over the means of the tasks. The samples of one task are correlated, so tasks count as
    independent, not samples (clustered standard errors, arXiv:2411.00640).
    """
    pass_at: Mapping[int, float]
    """k -> probability that at least one of k samples of a task passes; mean over tasks with k scored samples."""
    truncated_frac: float
    """Share of scored samples cut at the token limit."""
    failed_frac: float
    """Share of samples that could not be scored; no other metric counts them."""
    length_mean: float
    """Sampled tokens per scored sample, over all agents."""
    num_too_long: int
    """Tasks left out because their prompts exceed the limit."""

    def as_json(self) -> dict[str, float | None]:
        """Return one flat JSON object; `pass_at` becomes `pass@1`, `pass@2`, ..."""
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pass_at"}
        return {**flat, **{f"pass@{k}": share for k, share in self.pass_at.items()}}

    def as_metrics(self, dataset: str) -> dict[str, float]:
        """Return metric name -> value, e.g. `eval/held_out/pass@4`, without metrics that have no value."""
        return {f"eval/{dataset}/{name}": float(value) for name, value in self.as_json().items() if value is not None}


def table_of(results: Mapping[str, EvalMetrics]) -> list[str]:
    """Format the metrics of several data sets as a table: a header line, then a line per data set."""
    rows = {name: _cells(measures) for name, measures in results.items()}
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    lines = [["data set", *heads], *([name, *(cells.get(head, "") for head in heads)] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cells(measures: EvalMetrics) -> dict[str, str]:
    interval = "" if measures.mean_ci95 is None else f" ± {measures.mean_ci95:.3f}"
    return {
        "tasks": str(measures.num_tasks),
        "too long": str(measures.num_too_long),
        f"mean@{measures.samples}": f"{measures.mean:.3f}{interval}",
        **{f"pass@{k}": f"{share:.3f}" for k, share in measures.pass_at.items()},
        "tokens": f"{measures.length_mean:.1f}",
        "truncated": f"{measures.truncated_frac:.1%}",
        "failed": f"{measures.failed_frac:.1%}",
    }


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of `k` samples passes, if `num_passed` of `num_samples` did.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1), in exact integers up to the division.
    Raises `ValueError` unless 0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_passed <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_passed} of them passed, is not defined")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_passed, k)) / subsets


def ks_up_to(samples: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and `samples`; 6 gives `[1, 2, 4, 6]`."""
    return sorted({*(1 << i for i in range(samples.bit_length())), samples})


def eval_metrics_of(groups: Sequence[Group], *, samples: int, pass_reward: float, num_too_long: int) -> EvalMetrics:
    """Return the metrics of scored groups, one per task. A sample passes with a reward of at least `pass_reward`.

    Raises `RlsysError` if no sample was scored.
    """
    scored = [task for group in groups if (task := _scored(group))]
    if not scored:
        raise RlsysError(f"no sample could be scored: {_why(groups, num_too_long)}")
    means = [fmean(reward for reward, _ in task) for task in scored]
    counts = [(len(task), sum(reward >= pass_reward for reward, _ in task)) for task in scored]
    episodes = [episode for task in scored for _, episode in task]
    num_samples = samples * len(groups)
    return EvalMetrics(
        num_tasks=len(scored),
        samples=samples,
        mean=fmean(means),
        mean_ci95=Z_95 * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        pass_at=_pass_at(counts, samples),
        truncated_frac=fmean(any(t.outcome.kind is OutcomeKind.TRUNCATED for t in e.trajectories) for e in episodes),
        failed_frac=(num_samples - len(episodes)) / num_samples,
        length_mean=fmean(sum(s.num_trained for t in e.trajectories for s in t.samples) for e in episodes),
        num_too_long=num_too_long,
    )


def _scored(group: Group) -> list[tuple[float, EpisodeMeta]]:
    """Return (reward, episode) of each scored sample of one task."""
    roots = [(episode.trajectories[0].reward, episode) for episode in group.episodes if not episode.is_failed]
    return [(reward, episode) for reward, episode in roots if reward is not None]


def _pass_at(counts: Sequence[tuple[int, int]], samples: int) -> dict[int, float]:
    """Return pass@k from (scored, passed) of every task, for each k that some task has enough scored samples for."""
    by_k = {k: [pass_at_k(n, c, k) for n, c in counts if n >= k] for k in ks_up_to(samples)}
    return {k: fmean(shares) for k, shares in by_k.items() if shares}


def _why(groups: Sequence[Group], num_too_long: int) -> str:
    reasons = [t.outcome.reason for g in groups for e in g.episodes for t in e.trajectories if t.outcome.is_failed]
    return reasons[0] if reasons else f"{num_too_long} prompts are too long"
