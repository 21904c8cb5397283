"""The client programs that headgate's own environment lacks, each in one that has it (`make clients`), before one gateway.

Those that are too large for that (`make clients-all`) are skipped where they are not installed. The others are collected with
this repository's tests. What is known not to pass, and why, is in `known.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.clients.gate import Gate
from tests.compat.report import Row, read
from tests.compat.stage import stage
from tests.compat.suites import SUITES, run

NAMES = ("langchain-openai", "langgraph", "pydantic-ai", "smolagents", "inspect-ai", "mini-swe-agent")
LARGE = [suite.name for suite in SUITES if suite.packages or suite.environment.startswith("frameworks/")]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway that all of them share."""
    with stage(tmp_path_factory.mktemp("clients") / "stage") as there:
        yield Gate(there.gateway, there.engine)


@pytest.mark.clients
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in LARGE)])
def test_a_client_fails_nowhere_without_a_known_reason(name: str, gate: Gate, tmp_path: Path) -> None:
    (suite,) = (suite for suite in SUITES if suite.name == name)
    if name in LARGE and suite.lacks:
        pytest.skip(f"{name} is not installed: make {suite.lacks}/.ready")
    row = Row(name, suite.version(), suite.group, read(run(suite, gate, tmp_path)))
    unknown = [why for why, _, known in row.reasons() if not known]
    assert not unknown, "\n".join(unknown)
    assert any(case.outcome == "passed" for case in row.cases)
