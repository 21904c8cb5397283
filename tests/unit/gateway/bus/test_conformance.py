"""Bus conformance: the same tests for the in-memory bus and the Redis bus."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from gateway.bus.base import Process
from tests.harness.waiting import until
from tests.unit.gateway.bus.calls import BEGUN, A, B, C, goes_on, only, taken_by_b
from tests.unit.gateway.bus.conftest import Connect


async def test_a_process_is_alive_until_it_leaves(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=60)
    assert await bus.address_of("a") is None
    await bus.announce(A)
    await bus.announce(C)
    assert [await connect(heartbeat_ttl_s=60).address_of(p) for p in "abc"] == ["http://a", None, ""]
    await bus.leave(A)
    assert await bus.address_of("a") is None


async def test_a_silent_process_counts_as_dead(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=0.5)
    await bus.announce(A)

    async def gone() -> bool:
        return await bus.address_of("a") is None

    await until(gone, "it counts as gone")


async def test_a_log_is_read_as_it_was_written(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=60)
    assert await bus.find("place") == []
    assert await bus.write(A, [BEGUN, replace(BEGUN, call="other", place="elsewhere")]) == ["written"] * 2
    assert await bus.write(A, [goes_on(4, b"\xff\x00"), goes_on(6, b"")]) == ["written"] * 2
    log = await only(connect(heartbeat_ttl_s=60))
    assert (log.call, log.owner, log.epoch, log.url) == ("call", "a", 1, "http://a"), "writing announces"
    assert (log.head, log.state, log.body) == (b"\x00head", b"6", b"\x00\x01\x02\x03\xff\x00")
    assert 0 <= log.age_s < 60
    assert (await only(bus, "elsewhere")).call == "other"


async def test_a_batch_that_is_written_again_is_there_once(connect: Connect) -> None:
    """A process without an acknowledgment sends the batch again, with what came since."""
    bus = connect()
    await bus.write(A, [BEGUN])
    await bus.write(A, [goes_on(4, b"xy")])
    assert await bus.write(A, [goes_on(4, b"xyz")]) == ["written"]
    assert (await only(bus)).body == b"\x00\x01\x02\x03xyz"
    assert await bus.write(A, [BEGUN]) == ["written"]
    assert (await only(bus)).body == BEGUN.body


async def test_a_log_without_its_beginning_is_not_gone_on_with(connect: Connect) -> None:
    bus = connect()
    assert await bus.write(A, [goes_on(4, b"xy")]) == ["gone"]
    assert await bus.find("place") == []
    await bus.write(A, [BEGUN])
    assert await bus.write(A, [goes_on(5, b"xy")]) == ["gone"], "one byte was lost"
    assert (await only(bus)).body == BEGUN.body


async def test_a_log_that_is_over_is_gone(connect: Connect) -> None:
    bus = connect()
    await bus.write(A, [BEGUN])
    assert await bus.write(A, [goes_on(0, b"", over=True)]) == ["written"]
    assert await bus.find("place") == []
    assert await bus.write(A, [goes_on(0, b"", over=True)]) == ["written"], "it may be written twice"


async def test_a_log_is_forgotten_after_a_while(connect: Connect) -> None:
    bus = connect(log_s=1.0)
    await bus.write(A, [BEGUN])

    async def gone() -> bool:
        return await bus.find("place") == []

    await until(gone, "it is forgotten")


async def test_the_log_of_a_process_that_is_alive_cannot_be_taken(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=60)
    await bus.write(A, [BEGUN])
    assert not await bus.take_over(await only(bus), B)
    assert (await only(bus)).owner == "a"
    assert await bus.write(A, [goes_on(4, b"z")]) == ["written"]


async def test_who_takes_a_log_owns_it_alone(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=60)
    await bus.write(A, [BEGUN])
    await bus.leave(A)
    found = await only(bus)
    assert found.url is None
    assert await bus.take_over(found, B)
    taken = await only(bus)
    assert (taken.owner, taken.epoch, taken.url, taken.body) == ("b", 2, "http://b", BEGUN.body)
    for late in (goes_on(4, b"late"), BEGUN, goes_on(0, b"", over=True)):
        assert await bus.write(A, [late]) == ["taken"], "the old owner changes nothing any more"
    assert await bus.write(B, [goes_on(4, b"new", epoch=2)]) == ["written"]
    assert (await only(bus)).body == BEGUN.body + b"new"


async def test_of_many_who_take_a_log_one_gets_it(connect: Connect) -> None:
    bus = connect(heartbeat_ttl_s=60)
    for number in range(20):
        await bus.write(A, [replace(BEGUN, call=f"call-{number}", place=str(number))])
    await bus.leave(A)
    for number in range(20):
        log = await only(bus, str(number))
        takers = [Process(f"{number}-{i}") for i in range(5)]
        won = await asyncio.gather(*(bus.take_over(log, taker) for taker in takers))
        assert sum(won) == 1
        for taker in takers:
            await bus.leave(taker)
        assert not await bus.take_over(log, B), "it is not as it was found, though its owner is gone again"


@pytest.mark.parametrize("place", [BEGUN.place, ""])
async def test_who_slept_until_a_log_that_was_taken_was_over_hears_of_it(
    connect: Connect, place: str
) -> None:
    """A process that drops a log names no place."""
    bus = connect(heartbeat_ttl_s=60)
    await taken_by_b(bus)
    last = await only(bus)
    over = replace(goes_on(0, b"", epoch=2, over=True), place=place)
    assert await bus.write(B, [over] * 2) == ["written"] * 2
    for late in (goes_on(4, b"late"), BEGUN, goes_on(0, b"", over=True)):
        assert await bus.write(A, [late]) == ["taken"]
    assert await bus.find("place") == []
    await bus.leave(B)
    assert not await bus.take_over(last, C), "nothing is left to go on with"


async def test_it_is_forgotten_in_the_end_that_a_log_was_taken(connect: Connect) -> None:
    bus = connect(log_s=1.0)
    assert await bus.write(B, [goes_on(0, b"", epoch=2, over=True)]) == ["written"]

    async def forgotten() -> bool:
        return await bus.write(A, [goes_on(0, b"", over=True)]) == ["written"]

    await until(forgotten, "it is forgotten")


async def test_a_body_is_always_a_prefix_of_what_its_owner_wrote(connect: Connect) -> None:
    """Batches that are lost, and sent again, in whatever order."""
    bus, dice = connect(), random.Random(7)
    whole = dice.randbytes(4000)
    await bus.write(A, [replace(BEGUN, body=whole[:8])])
    known = sent = 8
    while known < len(whole):
        sent = min(len(whole), max(known, sent) + dice.randrange(40))
        outcome = await bus.write(A, [goes_on(known, whole[known:sent])])
        assert outcome == ["written"]
        body = (await only(bus)).body
        assert body == whole[: len(body)]
        if dice.random() < 0.7:  # else the response was lost
            known = sent
    assert (await only(bus)).body == whole


async def test_many_entries_in_one_write(connect: Connect) -> None:
    bus = connect()
    entries = [replace(BEGUN, call=f"{i:04}", body=str(i).encode()) for i in range(700)]
    assert await bus.write(A, entries) == ["written"] * 700
    assert [log.body for log in await bus.find("place")] == [entry.body for entry in entries]


async def test_a_value_stays_for_its_time(connect: Connect) -> None:
    bus = connect()
    assert await bus.get("snapshot") is None
    await bus.put("snapshot", b"\x00one", 60)
    await bus.put("brief", b"two", 0.2)
    assert await connect().get("snapshot") == b"\x00one"

    async def gone() -> bool:
        return await bus.get("brief") is None

    await until(gone, "it is forgotten")
    await bus.put("snapshot", b"", 60)
    assert await bus.get("snapshot") == b""


async def test_who_listens_is_woken(connect: Connect) -> None:
    bus = connect()
    async with aclosing(bus.listen("ledger", "engines")) as news:
        assert [await anext(news), await anext(news)] == [("ledger", b""), ("engines", b"")]
        await connect().publish("other", b"no")
        await connect().publish("engines", b"\x00yes")
        assert await anext(news) == ("engines", b"\x00yes")
