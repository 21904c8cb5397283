"""Streams that stay open, and when each of their tokens came.

Owns the connections. Each stream sends its next request when the last one has ended, as in `load`; but here every chunk is timed,
and its characters are counted: a token of `bench.endless` is one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self

import orjson

from bench.load import Connection, RequestFailed, Target, events_of

MAX_TOKENS = 400
_AFTER_FAILURE_S = 0.05


@dataclass(slots=True)
class Request:
    """The progress of one request."""

    call: str = ""
    """The id of the response."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(when, tokens)"""

    def gaps(self) -> Iterator[tuple[float, float]]:
        """Return the begin and the end of each gap between two chunks."""
        return ((a, b) for (a, _), (b, _) in pairwise(self.chunks))


class _TimedConnection(Connection):
    """A connection that notes in `request` when tokens come, and in `begun` that some have come."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__()
        self.request = Request()
        self._begun = begun
        self._rest = b""

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        now = time.perf_counter()
        whole, end, self._rest = (self._rest + body).rpartition(b"\n\n")
        for event in events_of(whole + end):
            if event == b"[DONE]":
                continue
            value = orjson.loads(event)
            self.request.call = value.get("id", "")
            tokens = sum(len(choice["delta"].get("content") or "") for choice in value.get("choices", ()))
            if tokens:
                self.request.chunks.append((now, tokens))
                self._begun.set()


class OpenStreams:
    """Keeps streams to a target open from entry to exit; the entry waits until each has its first token."""

    def __init__(self, target: Target, count: int) -> None:
        self.requests: list[list[Request]] = [[] for _ in range(count)]
        """The requests of each stream, in order; the last one is still running."""
        self.failures: Counter[str] = Counter()
        self._target = target
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        begun = [asyncio.Event() for _ in self.requests]
        for index, event in enumerate(begun):
            task = asyncio.create_task(self._stream(index, event), name=f"stream-{index}")
            self._tasks.append(task)
        for event in begun:
            await event.wait()
        return self

    async def __aexit__(self, *_: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(self, index: int, begun: asyncio.Event) -> None:
        """Request one after another. The first is shorter, so that streams do not end together."""
        count = len(self.requests)
        max_tokens = MAX_TOKENS // 4 + index * MAX_TOKENS * 3 // 4 // count
        loop = asyncio.get_running_loop()
        connect = partial(loop.create_connection, partial(_TimedConnection, begun), "127.0.0.1")
        connection: _TimedConnection | None = None
        try:
            while True:
                try:
                    if connection is None:
                        _, connection = await connect(self._target.port)
                    await self._one(connection, index, max_tokens)
                except (RequestFailed, OSError, TimeoutError) as error:
                    self.failures[str(error) or type(error).__name__] += 1
                    if connection is not None:
                        connection.close()
                    connection = None
                    await asyncio.sleep(_AFTER_FAILURE_S)
                max_tokens = MAX_TOKENS
        finally:
            if connection is not None:
                connection.close()

    async def _one(self, connection: _TimedConnection, index: int, max_tokens: int) -> None:
        connection.request = Request()
        self.requests[index].append(connection.request)
        status, body, _, _ = await connection.post(self._target.request(index, max_tokens, True))
        if status != 200:
            raise RequestFailed(f"{status} {body[:200].decode(errors='replace')}")
        self._target.count(events_of(body), True)
