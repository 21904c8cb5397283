"""Fixtures that several of these files use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, serve
from tests.harness.upstream import Elsewhere, behind
from tests.harness.weights import unlike


@pytest.fixture
async def elsewhere() -> AsyncIterator[tuple[Elsewhere, int]]:
    """The API, and its port."""
    there, port = Elsewhere(), free_port()
    async with serve(there.app(), port):
        yield there, port


@pytest.fixture
async def relayed(
    elsewhere: tuple[Elsewhere, int], tiny_model: Path, tmp_path: Path
) -> AsyncIterator[tuple[RunningGateway, Elsewhere]]:
    """A gateway before the API that sends keep-alives quickly."""
    there, port = elsewhere
    async with behind(tiny_model, tmp_path, port, server={"keep_alive_s": 0.05}) as gateway:
        yield gateway, there


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[int, Path]:
    """The weights of versions 0 to 4, of which no two sample alike; no test changes them."""
    return unlike(tmp_path_factory.mktemp("versions"), tiny_model)


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Any]:
    """A browser for a module whose tests run in one event loop."""
    from tests.harness.browser import run_browser

    async with run_browser() as running:
        yield running
