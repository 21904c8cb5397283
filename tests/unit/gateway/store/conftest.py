"""A store of each kind: every test that takes `store_url` runs on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.store import connections
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store, sqlite_store

KINDS = ("sqlite", "postgresql")
NewStore = Callable[[], str]


@pytest.fixture(params=KINDS)
def new_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewStore]:
    """Makes stores with empty tables; answers their URLs."""
    made: list[str] = []

    def make() -> str:
        if request.param == "sqlite":
            return sqlite_store(tmp_path_factory.mktemp("store") / "store.db")
        made.append(postgres_store(request.getfixturevalue("postgres")))
        return made[-1]

    yield make
    for url in made:
        request.getfixturevalue("postgres").drop_database(url.rpartition("/")[2])


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of PostgreSQL's that a test holds is not ended by the server, however long it takes."""
    monkeypatch.setattr(connections, "_IDLE_S", 3600)


@pytest.fixture
def store_url(new_store: NewStore) -> str:
    """A store with empty tables."""
    return new_store()


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    name = postgres.new_database()
    yield postgres.url(name)
    postgres.drop_database(name)
