"""Keys that the configuration does not have, each with what does the same, so that an error can name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.config.config_problems import Location, Problem

_ALWAYS = "it is always {}: leave it out"
_DASHBOARD = "set `dashboard: HOST:PORT`, such as 127.0.0.1:8321, or null"
_OF_SOURCES = {
    "later_weights": "set `weight: {0: 0.8, 100: 0.5}`, the weight by step",
    "proposed": "set `path: proposed`",
    "reward": "add an entry to `reward.fn`, with the name of the source: {fn: math, source: NAME}",
}
_RESOURCES = {"num_cpus": "cpus", "num_gpus": "gpus", "threads": "threads"}
_ROLES = {"train": "actor", "critic": "critic", "reference": "reference", "rollout": "rollout", "reward": "reward"}

MOVED: Mapping[str, str] = {
    **{f"{at}.{key}": f"set `resources.{role}.{to}`" for at, role in _ROLES.items() for key, to in _RESOURCES.items()},
    "data.sources": "set `data.path: [{path: a.jsonl, weight: 0.8}, ...]`",
    **{f"{at}.{key}": remedy for at in ("data", "data.path", "data.sources") for key, remedy in _OF_SOURCES.items()},
    "rollout.engine.type": "leave it out: `rollout.engine: {urls: [...]}` names vLLM servers",
    "rollout.kv_cache": "set `rollout.weight_change: inflight_recompute`, or inflight to keep the cache",
    "rollout.resident_versions": _ALWAYS.format("2 with rollout.weight_change beside"),
    "rollout.repack_s": _ALWAYS.format("5 s"),
    "rollout.probe_tolerance": _ALWAYS.format("1e-3 nats in float32, and 0.1 in bfloat16"),
    "rollout.early_ends.after": "set `rollout.early_ends: true`, which waits for half of a group",
    "rollout.early_ends.keep": "set `rollout.early_ends: true`, which keeps a quarter of the others",
    "reward.model": "add an entry to `reward.fn`: {fn: model, weight: 0.5, args: {path: PATH}}",
    "reward.processes": "set `reward.concurrency`",
    "reward.memory_mb": _ALWAYS.format("8192 MB"),
    "asynchrony.adaptive": _ALWAYS.format("true"),
    "curation.success_reward": "set `reward.success`",
    "curation.min_episodes": _ALWAYS.format("8"),
    "curation.look_again": _ALWAYS.format("4"),
    "eval.pass_reward": "set `reward.success`",
    "checkpoint.keep_every": "set `checkpoint.keep_last` to keep more checkpoints, or `checkpoint.keep_best`",
    "checkpoint.copy_to": "set `checkpoint.to: URL`, where checkpoints are written in place of the run's folder",
    "checkpoint.best_is": "begin the other key with the word: `checkpoint.best_by: lowest eval/NAME/METRIC`",
    "limits.max_failed_groups": "set `limits.failed_share`, the share of the last 100 groups that may fail",
    "limits.transfer_s": _ALWAYS.format("120 s, and more for large weights"),
    "limits.step_s": _ALWAYS.format("120 s"),
    "record.share": "leave it out: a step is written whole, and `record.rollouts_every` says which",
    "dashboard.enabled": _DASHBOARD,
    "dashboard.host": _DASHBOARD,
    "dashboard.port": _DASHBOARD,
    "ray.address": "set `ray: ADDRESS`",
    "ray.num_cpus": "set `ray: NUMBER`, the CPUs of a local cluster",
    "policies.is_frozen": "set `train: null` in the policy",
}
"""Remedy for a key, by its dotted name without indices and names of policies."""
_VALUES = ("dashboard", "ray", "rollout.early_ends")
"""Keys that have such keys in them, and no others."""
_DEPTH = 6
"""Sections and indices around such a key, at most."""


def take_moved(tree: Any, at: Location = ()) -> Iterator[Problem]:  # noqa: ANN401  (values of a configuration)
    """Remove such keys from a tree, and yield each with its remedy."""
    entries = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    if len(at) > _DEPTH:
        return
    for key, value in entries:
        here = (*at, key if isinstance(key, int) else str(key))
        if remedy := MOVED.get(_name_of(here)):
            yield here, f"no such key: {remedy}"
            yield from take_moved(value, here)
            del tree[key]
            continue
        was_section = value != {}
        yield from take_moved(value, here)
        if was_section and value == {} and _name_of(here) in _VALUES:
            del tree[key]


def _name_of(at: Location) -> str:
    """Dotted name in `MOVED`: that of a policy's section is that of the run's."""
    names = [part for part in at if isinstance(part, str)]
    if names[:1] == ["policies"] and len(names) > 2:
        names = names[:1] + names[2:] if len(names) == 3 else names[2:]
    return ".".join(names)
