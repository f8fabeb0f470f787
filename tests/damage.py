"""Damage to files, from a seed: what a full disk, a flipped bit, an editor or an enemy leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**30, -(10**30), 2**63, 1e308, "", "x", "NaN", [], {}, [1], {"a": 1}, "\ud800",
    "\x1b[31m", [[[]]],
)  # fmt: skip
ODD_JSON = ("NaN", "Infinity", "1e999", "9" * 5000, "-0", "[" * 600, r'"\ud800"')
ODD_YAML = (
    "2024-99-99", "2024-01-01", "&x {b: *x}", "[[[[", "1e999", "9" * 5000, "\x00", "null", "~", "-1", "{}",
    "!!python/object/apply:os.getcwd []", "*nope", "true", "[1,2]", "'", "{a: b: c}", "? x", "\t", "\ud800", "<<: 1",
    "1e30", "9" * 400, "0x" + "f" * 5000, r'"a\0b"', r'"\ud800"', "{2024-01-01: 1, 1: 2, null: 3, [a]: 4}", "!!int x",
    "!!bool x", "!!binary /w==", "!!set {a, b}", "!!omap [a: 1]", "[" * 600 + "]" * 600, "https://me:secret@host/v1",
    "{" + ", ".join(f"a{i}: &a{i} [{', '.join(8 * [f'*a{i - 1}' if i else 'x'])}]" for i in range(9)) + "}",
)  # fmt: skip


ODD_HEADERS = (
    "Content-Length: -1", "Content-Length: 1e3", "Content-Length: 99999999999999999999", "Content-Length: 5",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "Content-Encoding: br",
    "Expect: 100-continue", "Expect: the unexpected", "Connection: Upgrade\r\nUpgrade: websocket", "Host:",
    "Cookie: \xff", "Authorization: Bearer", "Authorization: \xe9", "X: " + "y" * 9000, ":", " folded",
    "Content-Type: text/html; charset=none", "Content-Encoding:", "Content-Encoding: \xe9", "Host: a\r\nHost: b",
    "Content-Type: multipart/form-data; boundary=", "Content-Type: application/x-www-form-urlencoded",
)  # fmt: skip


def damage(path: Path, random: Random) -> None:
    """Damage one file: cut it off, change bytes of it, or put odd values in their place."""
    data = path.read_bytes()
    kind = random.random()
    if not data:
        return
    if kind < 0.15:
        path.write_bytes(data[: random.randrange(len(data))])
    elif kind < 0.35 or path.suffix in (".gz", ".parquet"):
        path.write_bytes(with_other_bytes(data, random))
    else:
        change = _odd_json if path.suffix in (".jsonl", ".json") else _odd_yaml
        lines = data.decode(errors="replace").splitlines()
        path.write_bytes("\n".join([*change(lines, random), ""]).encode(errors="surrogatepass"))


def with_other_bytes(data: bytes, random: Random) -> bytes:
    """The same with one byte changed, or several."""
    changed = bytearray(data)
    for _ in range(random.choice([1, 3, 20])):
        changed[random.randrange(len(changed))] ^= random.randrange(1, 256)
    return bytes(changed)


def with_odd_value(value: Any, random: Random) -> Any:
    """The same JSON value with something in it deleted or replaced."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        rest = {name: each for name, each in value.items() if name != key}
        return rest if random.random() < 0.15 else {**rest, key: with_odd_value(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [*value[:place], with_odd_value(value[place], random), *value[place + 1 :]]
    return random.choice(ODD_VALUES)


def _odd_json(lines: Sequence[str], random: Random) -> list[str]:
    changed = list(lines)
    for _ in range(random.choice([1, 1, 5, 40])):
        place = random.randrange(len(changed))
        with suppress(ValueError):
            changed[place] = json.dumps(with_odd_value(json.loads(changed[place]), random))
        if random.random() < 0.1:
            changed[place] = changed[place].replace(":", f": {random.choice(ODD_JSON)}, ", 1)
    return changed


def _odd_yaml(lines: Sequence[str], random: Random) -> list[str]:
    place = random.randrange(len(lines))
    key = lines[place].partition(":")[0]
    return [*lines[:place], f"{key}: {random.choice(ODD_YAML)}", *lines[place + 1 :]]
