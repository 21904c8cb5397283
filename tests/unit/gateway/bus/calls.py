"""Calls on the bus that more than one test makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.bus.base import Bus, Entry, Log, Process

A, B, C = Process("a", "http://a"), Process("b", "http://b"), Process("c")


BEGUN = Entry("call", "place", 1, b"\x00head", b"1", 0, b"\x00\x01\x02\x03")


def goes_on(at: int, body: bytes, **values: Any) -> Entry:
    return replace(BEGUN, head=b"", state=str(at).encode(), at=at, body=body, **values)


async def only(bus: Any, place: str = "place") -> Log:
    (log,) = await bus.find(place)
    return log


async def taken_by_b(bus: Bus) -> Log:
    """B takes the log of A, which is gone. Returns the log as A had left it."""
    await bus.write(A, [BEGUN])
    await bus.leave(A)
    log = await only(bus)
    assert await bus.take_over(log, B)
    return log
