"""docs/guide/troubleshooting.md lists messages that the programs give in these words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.harness.fences import ROOT

PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
ROWS = [line.split(" | ")[0].lstrip("| ") for line in PAGE.splitlines() if line.startswith(("| `", "| 4"))]
MESSAGES = [code.replace("\\|", "|") for row in ROWS for code in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text in the programs' code; the parts of one that is formatted stand alone."""
    return list(_texts())


def _texts() -> Iterator[str]:
    for package in ("headgate", "gateway", "scheduler", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_programs(message: str, texts: list[str]) -> None:
    for part in (part.strip() for part in message.split("…")):
        assert not part or any(part in text for text in texts), f"no program has {part!r}"


def test_the_page_has_rows() -> None:
    assert len(MESSAGES) > 30
