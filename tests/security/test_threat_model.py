"""docs/topics/security.md names, for each threat, a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[str]:
    page = (ROOT / "docs" / "topics" / "security.md").read_text()
    table = [line for line in page.partition("## Threat model")[2].splitlines() if line.startswith("|")]
    return [line for line in table if not line.startswith(("| threat", "|---"))]


def test_every_threat_names_a_test_that_exists() -> None:
    assert len(rows()) >= 20
    for row in rows():
        threat, protection, tests = (cell.strip() for cell in row.strip("|").split("|"))
        named = _NAMED.findall(tests)
        assert threat and protection and named, row
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            found = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in found, f"{path} has no {name}"


def test_every_test_protects_from_a_threat() -> None:
    """Each file of these tests is named by a row at least."""
    named = {path for row in rows() for path, _ in _NAMED.findall(row)}
    here = {f"tests/security/{file.name}" for file in Path(__file__).parent.glob("test_*.py")}
    assert here - {f"tests/security/{Path(__file__).name}"} <= named
