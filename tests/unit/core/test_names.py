"""Names in the project: each module and each class has one of its own."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODULES = [path for room in ("rlsys", "workers", "algorithms") for path in sorted((ROOT / room).rglob("*.py"))]


def test_a_module_name_occurs_once() -> None:
    names = Counter(path.stem for path in MODULES if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_class_name_occurs_once() -> None:
    nodes = (node for path in MODULES for node in ast.walk(ast.parse(path.read_text())))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_room_says_what_lives_there() -> None:
    rooms = [path for path in MODULES if path.name == "__init__.py"]
    assert [str(path) for path in rooms if not ast.get_docstring(ast.parse(path.read_text()))] == []
