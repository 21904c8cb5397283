"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.forks import start_server
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import save_model
from tests.harness.servers import PostgresServer, RedisServer, postgres_server, redis_server
from tests.harness.vllm import LENGTH, SharedEngine

# The same examples in every run, so that one that fails always fails. HEADGATE_MACHINES=N: N times as many, and other ones.
settings.register_profile(
    "unhurried",
    max_examples=50 * int(os.environ.get("HEADGATE_MACHINES", "1")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="HEADGATE_MACHINES" not in os.environ,
)
settings.load_profile("unhurried")

# Nothing here speaks TLS: no client, in whatever process, reads the list of all authorities (20 ms) when it is made.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    directory = tmp_path_factory.mktemp("models") / "a"
    save_model(directory, seed=1)
    return directory


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """A real engine that tests share: each loads its own weights; one that kills it is marked `kills_shared_engine`."""
    folder = tmp_path_factory.mktemp("vllm")
    save_model(folder / "model", 0, length=LENGTH)
    engine = SharedEngine(folder / "model", folder / "engine.log")
    yield engine
    engine.kill()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the one server of forked programs import what they need while tests are collected."""
    if session.config.getoption("workers", 1) > 1 and not session.config.option.collectonly:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # its output is not for the terminal
        start_server()
        capture.suspend_global_capture()


def pytest_collection() -> None:
    """Collection makes millions of objects, all of which stay: to walk them again and again takes a fifth of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is collected as ever; what was collected before the tests is not walked any more."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that kill the shared engine come last, or it would be started once more for the tests after them.

    HEADGATE_ORDER=N shuffles the files, and the tests within each.
    """
    if (seed := os.environ.get("HEADGATE_ORDER")) is not None:
        random = Random(seed)
        places = {path: random.random() for path in dict.fromkeys(item.path for item in items)}
        random.shuffle(items)
        items.sort(key=lambda item: places[item.path])
    items.sort(key=lambda item: item.get_closest_marker("kills_shared_engine") is not None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that all tests share: each takes a `new_database()`, and none stops it."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A Redis server that all tests share: none stops or empties it."""
    with redis_server() as server:
        yield server


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with a fake engine in this process; batches of two groups, eta 1."""
    values = settings_for(tiny_model, tmp_path, staleness={"batch": 2, "eta": 1, "min_members": 1})
    async with run_gateway(values) as running:
        yield running
