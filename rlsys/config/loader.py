"""Loader of configurations: merges files and overrides into one tree, validates it once, and reports every problem."""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from ruamel.yaml import YAML, MappingNode, Node, SafeRepresenter, ScalarNode, SequenceNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from rlsys.config.config_problems import (
    MISSING,
    UNKNOWN,
    Location,
    Problem,
    dotted_key,
    problems_in,
    short_repr,
    unknown_key,
)
from rlsys.config.moved_keys import take_moved
from rlsys.config.plugins import PluginKind
from rlsys.config.policy_sections import OWN
from rlsys.errors import ConfigError
from rlsys.util.bounded_yaml import MOST_LETTERS, excess_of
from rlsys.util.regular_files import open_regular
from rlsys.util.url_credentials import without_credentials

Tree: TypeAlias = dict[str, Any]
Sources: TypeAlias = dict[tuple[str, ...], str]
Plugin: TypeAlias = "PluginKind[Any]"
C = TypeVar("C", bound=BaseModel)

_MOST_KEYS = 100_000
"""Most keys of a file. Aliases of aliases can be exponentially many."""
_MOST_DIGITS = 1_000
"""Longest integer that is read. Python refuses to convert more than 4,300 digits."""
_UNPAIRED = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_KEY_TAGS = {f"{_TAG}str", f"{_TAG}merge", f"{_TAG}int"}
_TAGS = {*_KEY_TAGS, *(_TAG + kind for kind in ("null", "bool", "float", "seq", "map"))}
"""Types of YAML that JSON has too."""


@dataclass(slots=True)
class Layer:
    """One file or override: its tree, and the source of each key (`file:line` or the command line)."""

    tree: Tree
    sources: Sources = field(default_factory=dict)


def load(config: type[C], paths: Sequence[str | Path], overrides: Sequence[str]) -> C:
    """Read, merge and validate. Raises `ConfigError` with every problem, each with its key and source."""
    layers = [*(_read(Path(p)) for p in paths), *(_override(o) for o in overrides)]
    return _validate_layers(config, layers, ", ".join(str(p) for p in paths) or "command line")


def _validate_layers(config: type[C], layers: Sequence[Layer], where: str) -> C:
    """Merge the layers and validate the result. `where` is the source of keys that none of them has."""
    merged, plugins = Layer({}), dict(_plugins_under(config))
    for layer in layers:
        for at in plugins:
            _write_out(layer, at)
        _merge(merged.tree, layer.tree, merged.sources)
        merged.sources |= layer.sources
    problems = list(take_moved(merged.tree))
    try:
        whole = config.model_validate(merged.tree)
    except ValidationError as error:
        found = [*problems, *problems_in(error)]
        # A program may pass rows later, so a configuration without data loads; one report lists all that is missing.
        if "data" in config.model_fields and "data" not in merged.tree:
            found.append((("data",), MISSING))
        raise ConfigError(_report(found, config, merged, where)) from None
    if problems:
        raise ConfigError(_report(problems, config, merged, where))
    return whole


def tree_in(path: Path) -> Tree:
    """Read the keys of a file, of any program. Raises `ConfigError` if it is no mapping."""
    return _read(path).tree


def of_tree(config: type[C], tree: Tree, where: str) -> C:
    """Validate a tree of keys. Raises `ConfigError` with every problem; `where` is the source that it names."""
    return _validate_layers(config, [Layer(tree)], where)


def load_sections(config: type[C], path: Path, sections: Collection[str], overrides: Sequence[str] = ()) -> C:
    """Read these sections of a file, with the defaults for all others, so that no code which those name is imported.

    Raises `ConfigError` as `load` does.
    """
    layer = _read(path)
    tree = {name: value for name, value in layer.tree.items() if name in sections}
    return _validate_layers(config, [Layer(tree, layer.sources), *map(_override, overrides)], str(path))


def texts_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration with its key, e.g. `("reward.fn", "exact")`. Imports nothing."""
    waiting: list[tuple[Location, object]] = [((), _read(path).tree)]
    while waiting:
        at, value = waiting.pop()
        if isinstance(value, str):
            yield dotted_key(at), value
        elif isinstance(value, dict):
            waiting += [((*at, key), each) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [((*at, index), each) for index, each in enumerate(value)]


def dump(tree: Mapping[str, object]) -> str:
    """Write a tree as YAML that `load` reads back."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.Representer = _Representer
    yaml.dump(tree, stream)
    return stream.getvalue()


class _Representer(SafeRepresenter):
    """YAML writer whose text values read back unchanged."""


def _text(representer: _Representer, value: str) -> ScalarNode:
    """Double-quote and escape a text with a line break that YAML would fold."""
    style = '"' if any(mark in value for mark in "\x85\u2028\u2029") else None
    return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Representer.add_representer(str, _text)


# ------------------------------------------------------------------------------------------------------------ reading


def _read(path: Path) -> Layer:
    is_device = path.is_relative_to("/dev")  # the shell's `<(command)` is a pipe there; elsewhere none is read
    try:
        with (
            path.open("rb") if is_device else open_regular(path) as opened,
            TextIOWrapper(opened, "utf-8") as file,
        ):
            text = file.read(MOST_LETTERS + 1)
    except (OSError, ValueError) as error:  # the latter also for a NUL in the path
        is_text = isinstance(error, UnicodeDecodeError)
        reason = "not UTF-8 text" if is_text else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read configuration {path}: {reason}") from None
    return _toml(path, text) if path.suffix == ".toml" else _yaml(path, text)


def _yaml(path: Path, text: str) -> Layer:
    try:
        tree, lines = _tree_of(text)
    except _NotYaml as error:
        raise ConfigError(f"{path}:{error.line}: not valid YAML: {error}") from None
    if tree is None:
        return Layer({})
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: a configuration is a mapping of sections, not a {type(tree).__name__}")
    return Layer(tree, {at: f"{path}:{line}" for at, line in lines.items()})


class _NotYaml(Exception):
    """Text that is no YAML, or none of a configuration."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def _tree_of(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Parse YAML: its value, and the line of every key. Raises `_NotYaml`."""
    if excess := excess_of(text):
        raise _NotYaml(1, excess)
    yaml = YAML(typ="safe", pure=True)
    try:
        lines = dict(islice(_yaml_lines(yaml.compose(text)), _MOST_KEYS + 1))
        if len(lines) > _MOST_KEYS:
            raise _NotYaml(1, f"it has more than {_MOST_KEYS} keys and entries, counting each use of an alias")
        return yaml.load(text), lines
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _NotYaml(line, error.problem or error.context or "it cannot be parsed") from None
    except RecursionError:
        raise _NotYaml(1, "it is nested too deeply, or contains itself") from None
    except (YAMLError, ValueError, KeyError) as error:  # the latter two: of a tagged value, such as `!!bool x`
        raise _NotYaml(1, str(error)) from None


def _yaml_lines(node: Node | None, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Line of every key and of every list entry; an entry is named by its index from 0.

    Raises `_NotYaml` for a value that no JSON has, and a key that is neither text nor an integer.
    """
    if node is None:  # the text is empty
        return
    entries: list[tuple[str, Node, Node]] = []
    line = node.start_mark.line + 1
    if isinstance(node, MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
        for name, key, _ in entries:
            if str(key.tag) not in _KEY_TAGS or _UNPAIRED.search(name):
                raise _NotYaml(key.start_mark.line + 1, f"the key {short_repr(key.value)} is no text; put it in quotes")
    elif isinstance(node, SequenceNode):
        entries = [(str(index), value, value) for index, value in enumerate(node.value)]
    elif len(node.value) > _MOST_DIGITS and str(node.tag) == f"{_TAG}int":
        raise _NotYaml(line, f"{short_repr(node.value)} has too many digits")
    elif _UNPAIRED.search(node.value):
        raise _NotYaml(line, f"{short_repr(node.value)} contains half of a surrogate pair, which is no character")
    if str(node.tag) not in _TAGS:
        raise _NotYaml(
            line, f"{short_repr(node.value)} is of the type {str(node.tag).removeprefix(_TAG)}; quote a text"
        )
    for name, start, value in entries:
        yield (*at, name), start.start_mark.line + 1
        yield from _yaml_lines(value, (*at, name))


def _toml(path: Path, text: str) -> Layer:
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # also for an integer of more digits than Python converts
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: it is nested too deeply") from None
    sources: Sources = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.-]+)\]", line):
            table = tuple(header[1].split("."))
            sources[table] = f"{path}:{number}"
        elif assignment := re.match(r"\s*([\w.-]+)\s*=", line):
            sources[(*table, *assignment[1].split("."))] = f"{path}:{number}"
    return Layer(tree, sources)


def _override(text: str) -> Layer:
    """Parse one `a.b=value`, also written `--a.b=value`; the value is YAML without comments."""
    key, equals, value = text.removeprefix("--").partition("=")
    if not equals or not all(key.split(".")):
        where = f"command line: {without_credentials(text)!r}"
        raise ConfigError(f"{where} is not of the form section.key=value")
    try:
        is_plain = value.lstrip()[:1] not in ("[", "{", '"', "'")
        tree: Any = value if is_plain and re.search(r"(^|\s)#", value) else _tree_of(value)[0]
    except _NotYaml as error:
        where = f"command line: {without_credentials(text)!r}"
        raise ConfigError(f"{where}: the value is not valid YAML; quote it: {error}") from None
    at = tuple(key.split("."))
    for part in reversed(at):
        tree = {part: tree}
    return Layer(tree, {at[:n]: f"command line: {text}" for n in range(1, len(at) + 1)})


def _merge(into: Tree, tree: Tree, sources: Sources, at: tuple[str, ...] = ()) -> None:
    """Merge `tree` into `into`, and remove the sources of replaced keys from `sources`.

    A mapping that changes its `type` replaces the old one, because the keys of the old type do not apply.
    """
    if "type" in tree and "type" in into and tree["type"] != into["type"]:
        into.clear()
        _forget(sources, at)
    for key, value in tree.items():
        here = (*at, str(key))
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, sources, here)
        else:
            into[key] = value
            _forget(sources, here)


def _write_out(layer: Layer, at: tuple[str, ...]) -> None:
    """Expand a plug-in's name in place of its section to `type`."""
    around, name = _at(layer.tree, at[:-1]), _at(layer.tree, at)
    if isinstance(around, dict) and isinstance(name, str):
        around[at[-1]] = {"type": name}
        if at in layer.sources:
            layer.sources[*at, "type"] = layer.sources[at]


def _forget(sources: Sources, at: tuple[str, ...]) -> None:
    for inside in [source for source in sources if source[: len(at)] == at]:
        del sources[inside]


# ---------------------------------------------------------------------------------------------------------- reporting


def _report(problems: list[Problem], config: type[BaseModel], merged: Layer, where: str) -> str:
    keys = _keys(config, merged.tree)
    lines = [
        f"  {_source(location, merged.sources) or where}: {dotted_key(location)}: "
        + (unknown_key(location, keys) if text == UNKNOWN else text)
        for location, text in problems
    ]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return without_credentials("\n".join([f"{count} in the configuration:", *lines]))


def _source(location: Location, sources: Sources) -> str | None:
    """Source of the key, or else of the innermost section around it."""
    at = tuple(str(part) for part in location)
    return next((sources[at[:n]] for n in range(len(at), 0, -1) if at[:n] in sources), None)


def _keys(config: type[BaseModel], tree: Tree) -> dict[tuple[str, ...], Sequence[str]]:
    """Keys of every section, including those of the chosen plug-ins."""
    keys: dict[tuple[str, ...], Sequence[str]] = {at: [*s.model_fields] for at, s in _sections_under(config)}
    keys |= dict(_mappings_under(config))
    plugins, policies = list(_plugins_under(config)), _at(tree, ("policies",))
    for at, kind in plugins:
        with suppress(ConfigError):  # already reported as a problem of its `type`
            keys[at] = kind.keys(_at(tree, at))
    for policy in map(str, policies) if isinstance(policies, dict) else ():
        keys["policies", policy] = OWN
        keys |= {("policies", policy, name): keys[name,] for name in OWN if (name,) in keys}
        for at, kind in plugins:
            own = _at(tree, ("policies", policy, *at))
            with suppress(ConfigError):
                if isinstance(own, dict) and "type" in own:
                    keys["policies", policy, *at] = kind.keys(own)
    return keys


def _plugins_under(section: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], Plugin]]:
    """Locations of the plug-in sections in a section and its subsections."""
    for at, inner in _sections_under(section):
        for name, info in inner.model_fields.items():
            parts = [*info.metadata, *_parts_of(info.annotation)]
            yield from (((*at, name), part) for part in parts if isinstance(part, PluginKind))


def _mappings_under(section: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], Sequence[str]]]:
    """Locations of mappings with fixed names, and of sections under each name, with the keys of each."""
    for at, inner in _sections_under(section):
        for name, info in inner.model_fields.items():
            for part in (info.annotation, *_parts_of(info.annotation)):
                if get_origin(part) is dict and get_origin(get_args(part)[0]) is Literal:
                    names, values = get_args(get_args(part)[0]), get_args(part)[1]
                    yield (*at, name), names
                    if isinstance(values, type) and issubclass(values, BaseModel):
                        yield from (((*at, name, each), [*values.model_fields]) for each in names)


def _parts_of(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts_of(part)


def _at(tree: object, at: tuple[str, ...]) -> object:
    """Value at a location; None if there is none."""
    for part in at:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _sections_under(
    section: type[BaseModel], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """A section and its subsections, including optional ones and list entries, by location."""
    yield at, section
    for name, info in section.model_fields.items():
        for part in (info.annotation, *_parts_of(info.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and not issubclass(part, RootModel):
                yield from _sections_under(part, (*at, name))
