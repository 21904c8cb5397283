"""A store of each kind: every test that takes `store_url` runs on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.sections import StoreSettings
from gateway.store.connections import connect
from gateway.store.schema import bring_up_to_date
from tests.harness.servers import PostgresServer

KINDS = ("sqlite", "postgresql")
NewStore = Callable[[], str]


@pytest.fixture(scope="session")
def migrated(postgres: PostgresServer) -> str:
    """A database with empty tables, to be copied."""
    name = postgres.new_database()
    engine = connect(postgres.url(name), 1)
    bring_up_to_date(engine, StoreSettings(url=postgres.url(name)))
    engine.dispose()
    return name


@pytest.fixture(params=KINDS)
def new_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewStore]:
    """Makes stores with empty tables, or (SQLite) without any yet; answers their URLs."""
    made: list[str] = []

    def make() -> str:
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path_factory.mktemp('store')}/deep/inside/store.db"
        made.append(request.getfixturevalue("postgres").new_database(request.getfixturevalue("migrated")))
        return str(request.getfixturevalue("postgres").url(made[-1]))

    yield make
    for name in made:
        request.getfixturevalue("postgres").drop_database(name)


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
