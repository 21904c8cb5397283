"""The client programs that headgate's own environment lacks, each in one that has it (`make clients`), before one gateway.

Those that are too large for that (`make clients-all`) are skipped where they are not installed. The others are collected with
this repository's tests. What is known not to pass, and why, is in `known.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compat.clients.gate import Gate
from tests.compat.report import Case, Row, read
from tests.compat.stage import stage
from tests.compat.suites import SUITES, Suite, run

TOGETHER = {
    "agents": ("langchain-openai", "langgraph", "pydantic-ai", "smolagents", "inspect-ai"),
    "openai2": ("mini-swe-agent",),
}
"""The clients by environment: one process runs those of one, because most of its time is the imports that they share."""
LARGE = [suite.name for suite in SUITES if suite.packages or suite.environment.startswith("frameworks/")]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway that all of them share."""
    with stage(tmp_path_factory.mktemp("clients") / "stage") as there:
        yield Gate(there.gateway, there.engine)


@pytest.mark.clients
@pytest.mark.parametrize("environment", TOGETHER)
def test_the_clients_of_an_environment_fail_nowhere_without_a_known_reason(
    environment: str, gate: Gate, tmp_path: Path
) -> None:
    suites = {suite.name: suite for suite in SUITES if suite.name in TOGETHER[environment]}
    tests = tuple(test for suite in suites.values() for test in suite.tests)
    options = tuple(option for suite in suites.values() for option in suite.options)
    together = replace(suites[TOGETHER[environment][0]], name=environment, tests=tests, options=options)
    cases = read(run(together, gate, tmp_path))
    for name in TOGETHER[environment]:
        file = Path(suites[name].tests[0]).stem
        check(suites[name], [case for case in cases if file in case.name])


@pytest.mark.clients
@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_a_large_client_fails_nowhere_without_a_known_reason(name: str, gate: Gate, tmp_path: Path) -> None:
    (suite,) = (suite for suite in SUITES if suite.name == name)
    if suite.lacks:
        pytest.skip(f"{name} is not installed: make {suite.lacks}/.ready")
    check(suite, read(run(suite, gate, tmp_path)))


def check(suite: Suite, cases: list[Case]) -> None:
    unknown = [why for why, _, known in Row(suite.name, "", suite.group, cases).reasons() if not known]
    assert not unknown, "\n".join(unknown)
    assert any(case.outcome == "passed" for case in cases), f"no test of {suite.name} passed"
