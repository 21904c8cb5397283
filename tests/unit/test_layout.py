"""Location of shared test code: modules without tests, which any test may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MODULES = {
    ".".join(file.relative_to(TESTS.parent).with_suffix("").parts) for file in TESTS.rglob("test_*.py")
}


def imported(file: Path) -> Iterator[str]:
    """Yield the whole names of what a module of this repository imports, wherever in it; of `from A import B`, A.B."""
    package = file.relative_to(TESTS.parent).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def is_of_tests(name: str) -> bool:
    """Return True if a name is a module of tests, or is in one."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in MODULES for end in range(1, len(parts) + 1))


def test_no_module_imports_a_module_of_tests() -> None:
    assert len(MODULES) > 100
    found = [
        f"{file.relative_to(TESTS.parent)}: {name}"
        for file in sorted(TESTS.rglob("*.py"))
        for name in imported(file)
        if is_of_tests(name)
    ]
    assert not found, "\n".join(found)
