"""A gateway as `gateway serve --demo` is, in the test's event loop, and a folder as a reader of a page has it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.cli.demo import demo_settings
from headgate.processes.ports import free_port
from tests.harness.gateway_command import write_toml
from tests.harness.gateways import RunningGateway, run_gateway
from tests.harness.typed import typed


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """The demo's gateway, with a grader; its file is in the folder of its database."""
    folder: Path = tmp_path_factory.mktemp("demo")
    values = demo_settings(folder, free_port())
    values["graders"] = {"length": {"function": "tests.harness.graders:length"}}
    async with run_gateway(values) as gateway:
        write_toml({**values, "engine": {"launch": "fake"}}, folder / "gateway.toml")
        yield gateway


@pytest.fixture(scope="session")
def typed_commands() -> Iterator[Path]:
    """A folder for PATH that has `gateway`, without the seconds of its start."""
    with tempfile.TemporaryDirectory(prefix="typed-") as folder, typed(Path(folder)) as commands:
        yield commands
