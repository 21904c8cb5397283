"""The gate that every client's test uses: the one that whoever started them has, or one of this session's own.

An environment collects the tests of the clients that it has. headgate's own has three; `tests/compat/test_clients.py` runs the
others where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.compat.clients.gate import Episode, Gate

_ELSEWHERE = {
    "agno": "test_agno.py",
    "autogen_agentchat": "test_autogen.py",
    "baml_py": "test_baml.py",
    "crewai": "test_crewai.py",
    "dspy": "test_dspy.py",
    "google.adk": "test_google_adk.py",
    "haystack": "test_haystack.py",
    "inspect_ai": "test_inspect_ai.py",
    "instructor": "test_instructor.py",
    "langchain_tests": "test_langchain.py",
    "langgraph": "test_langgraph.py",
    "litellm": "test_litellm.py",
    "llama_index": "test_llama_index.py",
    "llm": "test_llm.py",
    "magentic": "test_magentic.py",
    "minisweagent": "test_mini_swe_agent.py",
    "mirascope": "test_mirascope.py",
    "outlines": "test_outlines.py",
    "pydantic_ai": "test_pydantic_ai.py",
    "semantic_kernel": "test_semantic_kernel.py",
    "smolagents": "test_smolagents.py",
    "strands": "test_strands.py",
}
"""Tests of clients that headgate's environment lacks, by package."""


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of what holds the package
        return False


collect_ignore = [name for package, name in _ELSEWHERE.items() if not _is_installed(package)]
if "HEADGATE_COMPAT_GATEWAY" not in os.environ:  # `make test` installs none of these: `make test-compat` does
    collect_ignore.append("test_coding_agents.py")


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway before the scripted engine."""
    if "HEADGATE_COMPAT_GATEWAY" in os.environ:
        yield Gate(os.environ["HEADGATE_COMPAT_GATEWAY"], os.environ["HEADGATE_COMPAT_ENGINE"])
        return
    from tests.compat.stage import stage

    with stage(tmp_path_factory.mktemp("compat") / "stage") as there:
        yield Gate(there.gateway, there.engine)


@pytest.fixture
def episode(gate: Gate, request: pytest.FixtureRequest) -> Iterator[Episode]:
    """An episode of the test's own, whose record is checked afterwards."""
    opened = gate.open(request.node.name[:200])
    yield opened
    opened.check()
