"""Conversion of another trainer's arguments to a configuration: `rlsys convert FILE`.

    actor_rollout_ref: {rollout: {n: 5}}      ->      algorithm: {group_size: 5}

Nothing is dropped in silence: each key is converted, or listed with the reason and what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlsys.config.loader import Tree, dump, of_tree, tree_in
from rlsys.config.other_trainers import (
    CHANGES_TRAINING,
    DEFAULTS,
    FALSE_MATTERS,
    SWITCHES,
    System,
    habits_of,
    is_machinery,
)
from rlsys.config.schema import ALGORITHMS, ON_CPU_MICRO_BATCH_TOKENS, Config
from rlsys.errors import ConfigError

_VERL_SECTIONS = ("actor_rollout_ref", "trainer", "algorithm", "critic", "reward_model", "custom_reward_function")
_EPOCHS = {"verl": 30, "TRL": 3}
"""Passes over the data that they make if the file says neither steps nor epochs."""
_REFERENCE = re.compile(r"\$\{(?P<select>oc\.select:)?(?P<key>\.?[\w.]+)(?:,(?P<default>[^}]*))?\}")
_UNSUPPORTED = (
    "it is neither a YAML of verl (with actor_rollout_ref) nor arguments of TRL (with num_generations, learning_rate, "
    "...): give one of these, as .yaml or .json"
)


@dataclass
class Conversion:
    """Result of a conversion."""

    system: System
    given: Mapping[str, Any] = field(default_factory=dict)
    """Their keys in the file, dotted."""
    tree: Tree = field(default_factory=dict)
    """The configuration."""
    notes: list[str] = field(default_factory=list)
    """What the user should look at."""
    left_out: list[str] = field(default_factory=list)
    """Keys without a counterpart that would train another policy, or that are not known, with the reason."""
    without_effect: list[str] = field(default_factory=list)
    """Keys without a counterpart that change nothing that is learned, with the reason if there is one."""

    def lines(self) -> Iterator[str]:
        """Write the configuration as YAML, with the rest as comments."""
        yield f"# converted from {self.system}; what its file leaves out has the defaults of {self.system}"
        yield from (f"# look at: {note}" for note in self.notes)
        yield from (f"# left out: {reason}" for reason in self.left_out)
        yield from (f"# without effect: {reason}" for reason in self.without_effect)
        yield dump(self.tree).rstrip()

    def leave_out(self, key: str, reason: str) -> None:
        """Remove a key or section; name each of their keys behind it that the file gives."""
        *sections, name = key.split(".")
        at: Any = self.tree
        for section in sections:
            at = at.get(section, {})
        at.pop(name, None)
        for theirs, habit in habits_of(self.system).items():
            if self.given.get(theirs) is not None and (habit.ours == key or habit.ours.startswith(f"{key}.")):
                self.without_effect.append(f"{theirs}: {self.given[theirs]}: {reason}")

    def set(self, key: str, value: object) -> None:
        """Set a dotted key."""
        *sections, name = key.split(".")
        at = self.tree
        for section in sections:
            at = at.setdefault(section, {})
        if name not in at or not isinstance(at[name], dict):
            at[name] = value

    def get(self, key: str) -> Any:  # noqa: ANN401  (a value of a configuration)
        at: Any = self.tree
        for part in key.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        return at


def convert(path: Path) -> Conversion:
    """Convert a file. Raises `ConfigError` for a file of another kind, or one whose values are refused here."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: {_UNSUPPORTED}")
    given = theirs = _resolve_references(dict(_leaves(tree_in(path))))
    is_verl = any(key.partition(".")[0] == "actor_rollout_ref" for key in theirs)
    made = Conversion("verl" if is_verl else "TRL", given)
    known = habits_of(made.system)
    if not is_verl and len(known.keys() & theirs.keys()) < 2:
        raise ConfigError(f"{path}: {_UNSUPPORTED}")
    by_hand: dict[str, str] = {}
    is_kto = not is_verl and {"desirable_weight", "undesirable_weight"} & theirs.keys()
    if is_kto:
        made.set("algorithm.type", "kto")
    else:
        theirs = _with_defaults(made.system, theirs)
    for key in [key for key, value in theirs.items() if isinstance(value, str) and "${" in value]:
        made.left_out.append(f"{key}: {theirs.pop(key)}: it is computed from other keys; write its value")
    for key, value in theirs.items():
        habit = known.get(key)
        if value in (None, "???", {}, []) or (value is False and key not in FALSE_MATTERS):
            continue  # switched off, as here
        if habit is None and is_machinery(key):
            made.without_effect.append(f"{key}: {value}")
        elif habit is None:
            made.left_out.append(f"{key}: {value}: not known; see docs/coming-from.md")
        elif not habit.ours:
            listed = made.left_out if key in CHANGES_TRAINING else made.without_effect
            listed.append(f"{key}: {value}: {habit.note}")
        elif (ours := habit.value(value)) is None and habit.value in SWITCHES and isinstance(value, int | float):
            continue  # switched off by a number
        elif ours is None:
            by_hand[key] = f"{key}: {value}: {habit.ours}" + (f", {habit.note}" if habit.note else "")
        else:
            made.set("algorithm.beta" if is_kto and habit.ours == "algorithm.kl_coef" else habit.ours, ours)
    done = _finish_verl(made, theirs) if is_verl else _finish_trl(made, theirs)
    made.notes = [note for key, note in by_hand.items() if key not in done] + made.notes
    _leave_out_what_others_have(made)
    _complete(made)
    of_tree(Config, made.tree, f"converted from {path}")  # raises for what is refused
    return made


def _finish_trl(made: Conversion, theirs: Mapping[str, Any]) -> set[str]:
    """Convert what several keys say together; return those keys."""
    done: set[str] = set()
    group_size, samples = made.get("algorithm.group_size"), 1
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        samples *= _count(theirs.get(key)) or 1
    if _count(group_size) and _count(theirs.get("per_device_train_batch_size")):
        made.set("train.groups_per_step", max(1, samples // group_size))
        made.notes.append(f"train.groups_per_step is for one device: multiply it by their number ({samples} samples)")
        done |= {"per_device_train_batch_size", "gradient_accumulation_steps"}
    if (clip := made.get("algorithm.clip_low")) is not None and made.get("algorithm.clip_high") is None:
        made.set("algorithm.clip_high", clip)  # as TRL does
    if (schedule := theirs.get("lr_scheduler_type")) in ("linear", "cosine"):
        made.set("train.lr_schedule", schedule)
        made.set("train.final_lr_fraction", 0.0)
        done.add("lr_scheduler_type")
    elif schedule in ("constant", "constant_with_warmup"):
        done.add("lr_scheduler_type")
    if theirs.get("loss_type") == "cispo":
        made.set("algorithm.type", "cispo")
        done.add("loss_type")
    if made.get("algorithm.over") == "budget" and (length := made.get("rollout.max_new_tokens")):
        made.set("algorithm.budget", length)
    if theirs.get("importance_sampling_level") == "token":
        done.add("importance_sampling_level")
    first, second = theirs.get("adam_beta1", 0.9), theirs.get("adam_beta2", 0.999)
    if (first, second) != (0.9, 0.999) and isinstance(first, float) and isinstance(second, float):
        made.set("train.betas", [first, second])
        done |= {"adam_beta1", "adam_beta2"}
    _warm_up(made, theirs, "warmup_ratio", done)
    _sync_reference(made, theirs, done)
    if (function := _our_function(made.get("reward.fn"))) is not None:
        made.tree["reward"]["fn"] = function
    if made.get("train.lora") is None and any(key.startswith("lora_") for key in theirs):
        made.set("train.lora", {})
    if isinstance(functions := made.get("reward.fn"), list):
        weights = theirs.get("reward_weights") or [1.0] * len(functions)
        if not isinstance(weights, list) or len(weights) != len(functions):
            raise ConfigError(f"reward_weights: {weights}: give one for each of the {len(functions)} reward_funcs")
        done.add("reward_weights")
        made.tree["reward"]["fn"] = [{"fn": fn, "weight": w} for fn, w in zip(functions, weights, strict=True)]
    return done


def _sync_reference(made: Conversion, theirs: Mapping[str, Any], done: set[str]) -> None:
    """Convert the keys of a reference that follows the policy; without `sync_ref_model` and a `beta` they have no
    effect."""
    keys = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
    if theirs.get("sync_ref_model") is True and theirs.get("beta"):
        every, mixup = theirs.get("ref_model_sync_steps", 512), theirs.get("ref_model_mixup_alpha", 0.6)
        made.set("reference.sync", {"every": every, "mixup": mixup})
    else:
        unused = [f"{key}: {theirs[key]}: only with sync_ref_model and beta" for key in keys if theirs.get(key)]
        made.without_effect.extend(unused)
    done |= {*keys}


def _finish_verl(made: Conversion, theirs: Mapping[str, Any]) -> set[str]:
    """Convert what several keys say together; return those keys."""
    actor = "actor_rollout_ref.actor"
    done: set[str] = set()
    batch, mini = (_count(theirs.get(key)) for key in ("data.train_batch_size", f"{actor}.ppo_mini_batch_size"))
    if batch and mini:
        made.set("train.updates_per_step", max(1, batch // mini))
        done.add(f"{actor}.ppo_mini_batch_size")
    if f"{actor}.kl_loss_coef" in theirs:
        done.add(f"{actor}.use_kl_loss")
    if theirs.get(f"{actor}.use_kl_loss") is False and made.get("algorithm.kl_coef") is not None:
        made.tree["algorithm"]["kl_coef"] = 0.0
    if theirs.get("algorithm.use_kl_in_reward"):
        done |= {"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"}
        made.set("algorithm.kl_coef", theirs.get("algorithm.kl_ctrl.kl_coef", 0.001))
    ratio = theirs.get(f"{actor}.clip_ratio")
    if ratio is not None and made.get("algorithm.clip_high") is None:
        made.set("algorithm.clip_high", ratio)
    if file := theirs.get("custom_reward_function.path"):
        done |= {"custom_reward_function.path", "custom_reward_function.name"}
        made.set("reward.fn", f"{file}:{theirs.get('custom_reward_function.name', 'compute_score')}")
    else:
        made.set("reward.fn", "verl")  # by the data_source of each row
    if theirs.get("reward_model.reward_manager") == "naive":
        done.add("reward_model.reward_manager")
    if isinstance(files := made.get("data.path"), list):
        made.set("data.path", files[0] if len(files) == 1 else [{"path": path} for path in files])
    if isinstance(files := made.get("eval.data"), list):
        made.tree["eval"]["data"] = files[0] if len(files) == 1 else {f"set{i}": path for i, path in enumerate(files)}
    _warm_up(made, theirs, f"{actor}.optim.lr_warmup_steps_ratio", done)
    style = theirs.get(f"{actor}.optim.lr_scheduler_type") or theirs.get(f"{actor}.optim.warmup_style")
    if style == "cosine":
        made.set("train.lr_schedule", "cosine")
        made.set("train.final_lr_fraction", theirs.get(f"{actor}.optim.min_lr_ratio") or 0.0)
    if style in ("cosine", "constant"):
        done |= {f"{actor}.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "min_lr_ratio")}
    if theirs.get(f"{actor}.policy_loss.loss_mode") == "vanilla":
        done.add(f"{actor}.policy_loss.loss_mode")
    if theirs.get("actor_rollout_ref.model.target_modules") == "all-linear":
        done.add("actor_rollout_ref.model.target_modules")  # as here
    if made.get("algorithm.type") != "ppo":
        made.leave_out("critic", "there is no critic")
    if made.get("train.lora") is not None and made.get("train.lora.rank") is None:
        made.leave_out("train.lora", "there is no adapter without a lora_rank")
    gpus = _count(theirs.get("trainer.n_gpus_per_node")) * (_count(theirs.get("trainer.nnodes")) or 1)
    if gpus:
        done |= {"trainer.n_gpus_per_node", "trainer.nnodes"}
        _share_gpus(made, gpus)
    return done


def _leave_out_what_others_have(made: Conversion) -> None:
    """Leave out keys of other algorithms than the chosen one, which does not read them in their trainer either."""
    algorithm = made.tree.setdefault("algorithm", {})
    kind = str(algorithm.get("type", "grpo"))
    if kind not in ALGORITHMS.entry_points():
        return
    known = {each.name for each in fields(ALGORITHMS.find(kind))}
    for name in [name for name in algorithm if name != "type" and name not in known]:
        made.leave_out(f"algorithm.{name}", f"{kind} does not use it")


def _with_defaults(system: System, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file with the defaults of its trainer, where they are not ours."""
    return {**DEFAULTS[system], **{key: value for key, value in theirs.items() if value is not None}}


def _warm_up(made: Conversion, theirs: Mapping[str, Any], key: str, done: set[str]) -> None:
    """Convert a share of the steps into steps, if their number is given."""
    ratio, steps = theirs.get(key), _count(made.get("run.steps"))
    if not ratio:
        done.add(key)
    elif isinstance(ratio, float) and steps and made.get("train.warmup_steps") is None:
        made.set("train.warmup_steps", math.ceil(ratio * steps))
        done.add(key)


def _our_function(fn: object) -> object:
    """Return reward functions with `module:name` in place of their dotted `module.name`; None if none is dotted."""
    if isinstance(fn, list):
        names = [_our_function(one) or one for one in fn]
        return names if names != fn else None
    is_dotted = isinstance(fn, str) and all(part.isidentifier() for part in fn.split(".")) and "." in fn
    return ":".join(fn.rpartition(".")[::2]) if is_dotted and isinstance(fn, str) else None


def _share_gpus(made: Conversion, gpus: int) -> None:
    """Share GPUs between replicas, which get about half of them, and the ranks of actor, critic and reference."""
    parallel = _count(made.get("rollout.tensor_parallel")) or 1
    has_reference = bool(made.get("algorithm.kl_coef"))
    models = 2 if made.get("algorithm.type") == "ppo" else 1
    replicas = max(1, gpus // 2 // parallel)
    ranks = (gpus - replicas * parallel - has_reference) // models
    if ranks < 1:
        made.notes.append(f"{gpus} GPUs: too few for replicas, ranks and reference apart; see `rlsys plan`")
        return
    made.set("rollout.replicas", replicas)
    made.set("train.mesh.shard", max(1, ranks // (_count(made.get("train.mesh.context")) or 1)))
    gpus_of = {"actor": 1, "rollout": parallel, "reference": int(has_reference), "critic": models - 1}
    made.set("resources", {role: {"gpus": num} for role, num in gpus_of.items() if num})
    made.notes.append(
        f"{gpus} GPUs: {replicas * parallel} for replicas, {ranks * models} for ranks that train"
        f"{', 1 for the reference' if has_reference else ''}; `rlsys plan` says whether the model fits"
    )


def _count(value: object) -> int:
    """Return a count of theirs; 0 for any other value."""
    return value if isinstance(value, int) and value is not True and value > 0 else 0


def _resolve_references(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each value that is only a reference to another key, as in `${data.max_prompt_length}`."""

    def value_of(key: str, value: object) -> object:
        for _ in theirs:  # a reference to a reference; one to itself stays
            found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if found is None:
                break
            named = found["key"]
            named = f"{key.rpartition('.')[0]}{named}" if named.startswith(".") else named
            if named not in theirs and found["select"] is None:
                break
            key, value = named, theirs[named] if named in theirs else _plain_value(found["default"])
        return value

    return {key: value_of(key, value) for key, value in theirs.items()}


def _plain_value(text: str | None) -> object:
    """Parse the default of a reference."""
    plain = {"null": None, "true": True, "false": False, "": None, "[]": None}
    text = (text or "").strip()
    if text in plain:
        return plain[text]
    return int(text) if text.lstrip("-").isdigit() else text.strip("\"'")


def _complete(made: Conversion) -> None:
    """Fill in what a configuration must have."""
    if made.get("run.steps") is not None:
        made.tree["run"].pop("epochs", None)  # theirs, too, count steps if both are given
    elif made.get("run.epochs") is None:
        made.set("run.epochs", _EPOCHS[made.system])
    for key in ("model.path", "data.path"):
        if made.get(key) is None:
            made.set(key, "FILL-IN")
            made.notes.append(f"{key}: the file names none")
    longest = (_count(made.get("data.max_prompt_tokens")) or 1024) + (_count(made.get("rollout.max_new_tokens")) or 256)
    if (_count(made.get("train.micro_batch_tokens")) or ON_CPU_MICRO_BATCH_TOKENS) < longest:
        made.tree.setdefault("train", {})["micro_batch_tokens"] = longest
    if name := made.get("run.name"):
        made.tree["run"]["name"] = "".join(c if c.isalnum() or c in "_.-" else "-" for c in str(name))


def _leaves(tree: Mapping[str, Any], at: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested sections; `a.b: 1` and `{a: {b: 1}}` are the same."""
    for key, value in tree.items():
        place = (*at, str(key))
        if isinstance(value, Mapping) and ".".join(place) != "chat_template_kwargs":
            yield from _leaves(value, place)
        else:
            yield ".".join(place), value
