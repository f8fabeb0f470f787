"""Conversion of another trainer's arguments to a configuration: `rlsys convert FILE`.

    actor_rollout_ref: {rollout: {n: 5}}      ->      algorithm: {group_size: 5}

Nothing is dropped in silence: each key is converted, or listed with the reason and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.config.loader import Tree, dump, of_tree, tree_in
from rlsys.config.other_trainers import FALSE_MATTERS, System, habits_of
from rlsys.config.schema import ON_CPU_MICRO_BATCH_TOKENS, Config
from rlsys.errors import ConfigError

_VERL_SECTIONS = ("actor_rollout_ref", "trainer", "algorithm", "critic", "reward_model", "custom_reward_function")
_EPOCHS = {"verl": 30, "TRL": 3}
"""Passes over the data that they make if the file says neither steps nor epochs."""
_UNSUPPORTED = (
    "it is neither a YAML of verl (with actor_rollout_ref) nor arguments of TRL (with num_generations, learning_rate, "
    "...): give one of these, as .yaml or .json"
)


@dataclass
class Conversion:
    """Result of a conversion."""

    system: System
    tree: Tree = field(default_factory=dict)
    """The configuration."""
    notes: list[str] = field(default_factory=list)
    """What the user should look at."""
    left_out: list[str] = field(default_factory=list)
    """Keys without a counterpart, with the reason."""

    def lines(self) -> Iterator[str]:
        """Write the configuration as YAML, with the rest as comments."""
        yield f"# converted from {self.system}; keys that its file leaves out have the defaults of rlsys"
        yield from (f"# look at: {note}" for note in self.notes)
        yield from (f"# left out: {reason}" for reason in self.left_out)
        yield dump(self.tree).rstrip()

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
    theirs = _resolve_references(dict(_leaves(tree_in(path))))
    is_verl = any(key.partition(".")[0] == "actor_rollout_ref" for key in theirs)
    known = habits_of("verl" if is_verl else "TRL")
    if not is_verl and len(known.keys() & theirs.keys()) < 2:
        raise ConfigError(f"{path}: {_UNSUPPORTED}")
    made = Conversion("verl" if is_verl else "TRL")
    by_hand: dict[str, str] = {}
    is_kto = not is_verl and {"desirable_weight", "undesirable_weight"} & theirs.keys()
    if is_kto:
        made.set("algorithm.type", "kto")
    for key in [key for key, value in theirs.items() if isinstance(value, str) and "${" in value]:
        made.left_out.append(f"{key}: {theirs.pop(key)}: it is computed from other keys; write its value")
    for key, value in theirs.items():
        if (habit := known.get(key)) is None:
            made.left_out.append(f"{key}: {value}: not known; see docs/coming-from.md")
        elif value is None or (value is False and key not in FALSE_MATTERS):
            continue  # switched off, as here
        elif not habit.ours:
            made.left_out.append(f"{key}: {value}: {habit.note}")
        elif (ours := habit.value(value)) is None:
            by_hand[key] = f"{key}: {value}: {habit.ours}" + (f", {habit.note}" if habit.note else "")
        else:
            made.set("algorithm.beta" if is_kto and habit.ours == "algorithm.kl_coef" else habit.ours, ours)
    done = _finish_verl(made, theirs) if is_verl else _finish_trl(made, theirs)
    made.notes = [note for key, note in by_hand.items() if key not in done] + made.notes
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
    if made.get("train.lora") is None and any(key.startswith("lora_") for key in theirs):
        made.set("train.lora", {})
    if isinstance(functions := made.get("reward.fn"), list):
        weights = theirs.get("reward_weights") or [1.0] * len(functions)
        if not isinstance(weights, list) or len(weights) != len(functions):
            raise ConfigError(f"reward_weights: {weights}: give one for each of the {len(functions)} reward_funcs")
        done.add("reward_weights")
        made.tree["reward"]["fn"] = [{"fn": fn, "weight": w} for fn, w in zip(functions, weights, strict=True)]
    return done


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
    if isinstance(files := made.get("data.path"), list):
        made.set("data.path", files[0] if len(files) == 1 else [{"path": path} for path in files])
    if isinstance(files := made.get("eval.data"), list):
        made.tree["eval"]["data"] = files[0] if len(files) == 1 else {f"set{i}": path for i, path in enumerate(files)}
    ranks = (_count(theirs.get("trainer.n_gpus_per_node")) or 1) * (_count(theirs.get("trainer.nnodes")) or 1)
    if ranks > 1:
        done |= {"trainer.n_gpus_per_node", "trainer.nnodes"}
        made.notes.append(f"{ranks} GPUs: share them between rollout.replicas and train.mesh.shard")
    return done


def _count(value: object) -> int:
    """Return a count of theirs; 0 for any other value."""
    return value if isinstance(value, int) and value is not True and value > 0 else 0


def _resolve_references(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each value that is only a reference to another key, as in `${data.max_prompt_length}`."""

    def value_of(value: object) -> object:
        for _ in theirs:  # a reference to a reference; one to itself stays
            found = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            if found is None or found[1] not in theirs:
                break
            value = theirs[found[1]]
        return value

    return {key: value_of(value) for key, value in theirs.items()}


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
