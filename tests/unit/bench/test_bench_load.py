"""Measurement windows: chunks count when they arrive, not when their response ends; and the lag of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from bench.lagging import EVERY_S, LagSampler
from bench.load import RequestFailed, Response, Shape, measure
from bench.memory import Point, size_at

CHUNKS = 8
STREAMS = 4


def test_the_share_of_a_response_is_what_came_inside() -> None:
    response = Response(0.1, 1.0, 4, 4, 3.0, [1.0, 2.0, 3.0], [2, 1, 1])
    assert response.share(0.0, 9.0) == 1.0
    assert response.share(1.5, 2.5) == 0.25
    assert response.share(0.0, 2.0) == 0.5
    whole = Response(0.1, 1.0, 1, 4, 3.0, [], [])
    assert (whole.share(2.0, 4.0), whole.share(3.5, 4.0)) == (1.0, 0.0)


class Scripted:
    """A target whose responses are counted by their `x`."""

    name = "scripted"

    def __init__(self, port: int) -> None:
        self.port = port

    def begins(self, body: bytes, streamed: bool) -> bool:
        return b"x" in body

    def request(self, stream: int, max_tokens: int, streamed: bool) -> bytes:
        return b"GET / HTTP/1.1\r\n\r\n"

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        if events[-1] != b"[DONE]":
            raise RequestFailed("early")
        return events.count(b"x"), 3 * events.count(b"x")


served: Counter[str] = Counter()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            served["requests"] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for event in [b"role", *[b"x"] * CHUNKS, b"[DONE]"]:
                data = b"data: " + event + b"\n\n"
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await asyncio.sleep(0.002)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def test_a_window_counts_what_came_in_it() -> None:
    served.clear()
    async with await asyncio.start_server(_serve, "127.0.0.1", 0) as server:
        target = Scripted(server.sockets[0].getsockname()[1])
        window = await measure(target, Shape(STREAMS, 8, True), 0.2, {"none": lambda: 0.0})
    assert window.failures == {}
    assert len(window.responses) <= served.total() - STREAMS, "the first answer of each stream came before"
    assert window.tokens == pytest.approx(3 * window.chunks)
    assert len(window.responses) >= window.requests > 0
    assert len(window.responses) - window.requests <= STREAMS, "at most what was under way came later"
    at_most = sum(response.chunks for response in window.responses)
    assert at_most - 2 * STREAMS * CHUNKS <= window.chunks <= at_most
    assert all(0 < response.first_s <= response.whole_s for response in window.responses)


async def test_a_loop_that_is_held_up_counts_every_moment_of_it() -> None:
    sampler = LagSampler()
    await asyncio.sleep(0)
    sampler.reset()
    began = time.perf_counter()
    time.sleep(0.1)  # noqa: ASYNC251 (that is the point)
    held = time.perf_counter() - began
    await asyncio.sleep(3 * EVERY_S)
    found = sampler.reset()
    assert found["max"] is not None
    assert found["max"] >= (held - EVERY_S) * 900
    assert found["samples"] is not None
    assert found["samples"] >= (held - 2 * EVERY_S) / EVERY_S
    assert sampler.reset()["samples"] == 0


def test_a_size_is_a_median_near_its_point() -> None:
    series = [Point(n, 0.0, float(n), 0.0) for n in range(0, 101, 10)]
    assert size_at(series, 100, 20) == 90.0
    assert size_at(series, 55, 1) in (50.0, 60.0)
