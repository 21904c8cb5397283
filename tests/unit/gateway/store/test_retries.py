"""A retry that starts over and the call that it repeats: one of the two is recorded, in any order of their transactions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.config import StoreSettings
from gateway.store import episodes, turns
from gateway.store.database import Database
from headgate.errors import Conflict
from tests.unit.gateway.store.locks import wait_for_a_lock
from tests.unit.gateway.store.rows import BODY, NAME, episode, record, turn


@pytest.fixture
async def database(store_url: str) -> Any:
    opened = await Database.open(StoreSettings(url=store_url))
    await opened.submit(lambda c: episodes.insert_episode(c, episode("e")))
    yield opened
    await opened.close()


async def begin(database: Database, call_id: str, name: str = NAME) -> bool:
    return await database.submit(lambda c: turns.restart(c, "e", name, call_id))


async def recorded(database: Database) -> list[str]:
    return [row["id"] for row in await database.read(lambda c: turns.calls(c, "e"))]


async def test_a_call_of_before_gives_no_reply_any_more(database: Database) -> None:
    assert await begin(database, "retry")
    with pytest.raises(Conflict) as error:
        await record(database, *turn("first"))
    assert error.value.code == "requested_again"
    await record(database, *turn("retry"))
    await record(database, *turn("first", 1, finish_reason="abandoned"))
    assert sorted(await recorded(database)) == ["first", "retry"]


@pytest.mark.parametrize(
    ("ago_s", "other"),
    [(-1.0, {}), (60.0, {"request_key": "m" * turns.NAME + BODY}), (60.0, {"request_key": ""})],
    ids=["a later call", "another request", "without a key"],
)
async def test_other_calls_are_not_concerned(database: Database, ago_s: float, other: dict[str, Any]) -> None:
    assert await begin(database, "retry")
    await record(database, *turn("other", **other), ago_s=ago_s)
    assert await recorded(database) == ["other"]


async def test_a_call_that_came_at_the_same_moment_is_refused(database: Database) -> None:
    """Its client waits, and requests again; two responses could not be distinguished later."""
    arrived = time.monotonic()
    assert await begin(database, "retry")
    with pytest.raises(Conflict):
        await database.submit(lambda c: turns.insert_shared_turns(c, [(turn("first"), arrived)]))


async def test_of_two_retries_the_newer_one_replies(database: Database) -> None:
    assert await begin(database, "one") and await begin(database, "two")
    with pytest.raises(Conflict):
        await record(database, *turn("one"))
    await record(database, *turn("two"))
    assert not await begin(database, "three"), "it is answered"
    assert await recorded(database) == ["two"]


async def test_an_abandoned_call_is_no_response(database: Database) -> None:
    await record(database, *turn("first", finish_reason="abandoned"))
    assert await begin(database, "retry")


async def test_a_call_that_is_recorded_twice_gets_that_error_first(database: Database) -> None:
    await record(database, *turn("first"))
    assert not await begin(database, "retry")
    with pytest.raises(Conflict) as error:
        await record(database, *turn("first", 1))
    assert error.value.code == "recorded_elsewhere"


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("earlier", ["record", "retry"])
async def test_the_later_of_two_transactions_waits_and_sees_what_the_earlier_did(
    store_url: str, earlier: str
) -> None:
    if not store_url.startswith("postgresql"):
        pytest.skip("SQLite has one writer at a time")
    one, other = [await Database.open(StoreSettings(url=store_url)) for _ in range(2)]
    await one.submit(lambda c: episodes.insert_episode(c, episode("e")))
    arrived = time.monotonic()
    writes = {
        "record": lambda c: turns.insert_shared_turns(c, [(turn("first"), arrived)]),
        "retry": lambda c: turns.restart(c, "e", NAME, "retry"),
    }
    late = writes["retry" if earlier == "record" else "record"]
    begun: list[Any] = []

    def write(connection: Any) -> Any:
        result = writes[earlier](connection)
        if not begun:
            one._loop.call_soon_threadsafe(lambda: begun.append(other.submit(late)))
            wait_for_a_lock(store_url)
        return result

    first = await one.submit(write)
    if earlier == "record":
        assert not await begun[0], "it was answered"
        assert await recorded(one) == ["first"]
    else:
        assert first
        with pytest.raises(Conflict) as error:
            await begun[0]
        assert error.value.code == "requested_again" and await recorded(one) == []
    await one.close()
    await other.close()
