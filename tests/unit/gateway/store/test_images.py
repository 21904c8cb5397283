"""The files of images: written once, bounded by episode, never lost to a deletion while an episode begins to have them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, event

from gateway.store import episodes, images
from gateway.store.connections import connect
from gateway.store.models import EpisodeRow
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store
from tests.unit.gateway.store.locks import wait_for_a_lock
from tests.unit.gateway.store.rows import episode

FILE = {"hash": "a" * 64, "media_type": "image/png", "data": b"12345"}
OTHER = {"hash": "b" * 64, "media_type": "image/png", "data": b"123456"}
BOTH = {FILE["hash"], OTHER["hash"]}
A, B = str(FILE["hash"]), str(OTHER["hash"])
ROOM = 11


@pytest.fixture
def two_episodes(engine: Engine) -> Engine:
    """Return a store with two open episodes."""
    with engine.begin() as connection:
        open_episodes(connection)
    return engine


def open_episodes(connection: Connection) -> None:
    for name in ("one", "two"):
        episodes.insert_episode(connection, episode(name, mode="eval"))


def test_a_file_is_written_once_and_nothing_for_an_episode_that_has_it(two_episodes: Engine) -> None:
    executed: list[str] = []
    event.listen(two_episodes, "before_cursor_execute", lambda _c, _cu, sql, *_: executed.append(sql))
    with two_episodes.begin() as connection:
        for name in ("one", "one", "two"):
            assert images.keep(connection, name, {A}, [FILE], ROOM)[0] == set()
        assert images.used_by(connection, ["one"]) == images.used_by(connection, ["two"]) == {A}
    writes = [sql.split()[2].strip('"') for sql in executed if sql.startswith("INSERT")]
    assert writes == ["images", "image_uses", "image_uses"]


def test_an_episode_has_no_more_bytes_than_it_may_and_keeps_what_it_has(two_episodes: Engine) -> None:
    with two_episodes.begin() as connection:
        assert images.keep(connection, "one", {A}, [FILE], ROOM - 1) == (set(), 5)
        assert images.keep(connection, "one", BOTH, [FILE, OTHER], ROOM - 1) == (set(), 11)
        assert images.read(connection, B) is None
        assert images.keep(connection, "one", BOTH, [OTHER], ROOM) == (set(), 11)
        assert images.used_by(connection, ["one"]) == BOTH
        assert images.keep(connection, "two", {"c" * 64, A}, [], ROOM)[0] == {"c" * 64}
        assert images.used_by(connection, ["two"]) == set()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """Yield a store of PostgreSQL's with two open episodes, the first of which has an image."""
    url = postgres_store(postgres)
    made = connect(url, 1)
    with made.begin() as connection:
        open_episodes(connection)
        images.keep(connection, "one", {A}, [FILE], ROOM)
    made.dispose()
    yield url
    postgres.drop_database(url.rpartition("/")[2])


def drop_first(connection: Connection) -> None:
    """Delete an episode as retention does."""
    connection.execute(delete(EpisodeRow).where(EpisodeRow.id == "one"))
    images.delete_unused(connection, {A})


def keep_second(connection: Connection) -> Any:
    return images.keep(connection, "two", {A}, [], ROOM)


@pytest.mark.usefixtures("idle")
def test_an_image_that_an_episode_begins_to_have_is_not_deleted(postgres_url: str) -> None:
    assert together(postgres_url, keep_second, drop_first) == ((set(), 5), None)
    made = connect(postgres_url, 1)
    with made.begin() as connection:
        assert images.read(connection, A) == ("image/png", b"12345")
    made.dispose()


@pytest.mark.usefixtures("idle")
def test_an_image_that_is_just_deleted_is_missed(postgres_url: str) -> None:
    assert together(postgres_url, drop_first, keep_second) == (None, ({A}, 0))


def together(url: str, first: Any, second: Any) -> tuple[Any, Any]:
    """Return what both return, if the second has to wait for the transaction of the first."""
    one, other = connect(url, 1), connect(url, 1)

    def wait() -> Any:
        with other.begin() as connection:
            return second(connection)

    with ThreadPoolExecutor(1) as pool:
        with one.begin() as connection:
            responded = first(connection)
            waiting = pool.submit(wait)
            wait_for_a_lock(url)
        result = responded, waiting.result(60)
    one.dispose()
    other.dispose()
    return result
