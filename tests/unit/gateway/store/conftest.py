"""A store of each kind: every test that takes `store_url` runs on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine

from gateway.config import StoreSettings
from gateway.store import connections
from gateway.store.connections import connect
from gateway.store.database import Database
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store, sqlite_store

KINDS = ("sqlite", "postgresql")
NewStore = Callable[[], str]


@pytest.fixture(params=KINDS)
def new_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewStore]:
    """Make stores with empty tables; return their URLs."""
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
    """Keep PostgreSQL from ending a transaction that a test holds, however long it takes."""
    monkeypatch.setattr(connections, "_IDLE_S", 3600)


@pytest.fixture
def store_url(new_store: NewStore) -> str:
    """Return a store with empty tables."""
    return new_store()


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(StoreSettings(url=store_url))
    yield opened
    await opened.close()


@pytest.fixture
def engine(store_url: str) -> Iterator[Engine]:
    opened = connect(store_url, 3)
    yield opened
    opened.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """Yield a connection in a transaction."""
    with engine.begin() as opened:
        yield opened


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    name = postgres.new_database()
    yield postgres.url(name)
    postgres.drop_database(name)
