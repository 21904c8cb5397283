"""The gate that every client's test uses: that of the program that started the tests, or one of this session.

`make test` collects the tests of the openai and anthropic SDKs alone; `tests/compat/suites.py` names those of each environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.clients.gate import Episode, Gate

if "HEADGATE_COMPAT_GATEWAY" not in os.environ:
    _here = Path(__file__).parent
    collect_ignore = [
        p.name for p in _here.glob("test_*.py") if p.stem not in ("test_openai", "test_anthropic")
    ]


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
    """An episode for one test, whose record is checked afterwards."""
    opened = gate.open(request.node.name[:200])
    yield opened
    opened.check()
