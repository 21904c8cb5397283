"""The gate that every client's test uses: the one that `make test-compat` started, or one of this session's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compat.clients.gate import Episode, Gate


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
