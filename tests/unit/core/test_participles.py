"""Names of functions: a verb for what is done, or a noun for what is returned; no bare participle, such as `rooted`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ("rlsys", "workers", "algorithms")
MOST = 10
"""Functions that may keep such a name, because it is the field's own word: `failed(reason)`, the outcome."""
IRREGULAR = frozenset({
    "begun", "bought", "brought", "built", "caught", "chosen", "come", "done", "drawn", "driven", "fallen",
    "forgotten", "found", "frozen", "given", "gone", "got", "grown", "heard", "held", "hidden", "kept", "known",
    "laid", "led", "left", "lent", "lost", "made", "meant", "met", "paid", "said", "seen", "sent", "shown",
    "sold", "spent", "taken", "taught", "thought", "told", "torn", "woken", "won", "worn", "written",
})  # fmt: skip
"""Participles without -ed that are no verb's first form: `put`, `read`, `run` and `split` are verbs."""
VERBS_AND_NOUNS = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"})
PARTICLES = frozenset({
    "again", "anew", "at", "away", "back", "by", "down", "early", "for", "from", "in", "into", "late", "now",
    "of", "off", "on", "out", "over", "to", "up", "with",
})  # fmt: skip


def is_bare(name: str) -> bool:
    """True for a participle alone, or followed only by prepositions and adverbs: `told`, `_laid_over`, `judged_in`."""
    first, *rest = name.strip("_").split("_")
    is_participle = first in IRREGULAR or (first.endswith("ed") and first not in VERBS_AND_NOUNS)
    return is_participle and PARTICLES.issuperset(rest)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_rooted", True), ("told", True), ("laid_over", True), ("given_up", True), ("fork_environment", False),
        ("trained_groups", False), ("seed", False), ("read", False), ("_on_join", False), ("__init__", False),
    ],
)  # fmt: skip
def test_the_rule_tells_participles_from_verbs_and_nouns(name: str, expected: bool) -> None:
    assert is_bare(name) is expected


def test_no_function_is_named_by_a_bare_participle() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for room in PRODUCT
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bare(node.name)
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_no_local_variable_is_called_told_or_said() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in PRODUCT
        for path in sorted((ROOT / room).rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in ("told", "said"))
        or (isinstance(node, ast.arg) and node.arg in ("told", "said"))
    ]
    assert found == []
