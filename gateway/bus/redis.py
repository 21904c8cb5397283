"""A bus in a Redis server.

Owns the connections. After a failure every operation fails immediately for `_RETRY_S`, so that callers do not wait during an
outage. One warning reports the outage, one line its end. A broken listening connection is not an outage and has its own
warning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.bus import scripts
from gateway.bus.base import Entry, Log, Outcome, Process
from gateway.config import BusSettings
from headgate.errors import BusUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
_RETRY_S = 0.5
"""Seconds after a failure in which no operation is tried."""
_STILL_S = 0.5
"""An operation that ended this long after its limit was delayed by a suspension of this process, not by the bus."""
_AT_ONCE = 128
"""Entries in one script, which blocks the server."""


class RedisBus:
    """A bus in a Redis server."""

    shared = True

    def __init__(self, settings: BusSettings) -> None:
        self._settings = settings
        self._prefix = f"{settings.prefix}:"
        # No `socket_timeout`: redis-py implements it by asyncio.wait_for, which on Python 3.11 swallows a cancellation just after
        # the write has ended. `_execute` limits every operation.
        limits: dict[str, Any] = {
            "socket_timeout": None,
            "socket_connect_timeout": settings.timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "client_name": "headgate",
        }
        self._redis = Redis.from_url(settings.url, **limits)
        self._listening = Redis.from_url(settings.url, health_check_interval=2, **limits)
        self._write = self._redis.register_script(scripts.WRITE)
        self._find = self._redis.register_script(scripts.FIND)
        self._claim = self._redis.register_script(scripts.CLAIM)
        self._failed_at = -math.inf
        self._unavailable = False

    @property
    def unbroken_s(self) -> float:
        return time.monotonic() - self._failed_at

    async def announce(self, process: Process) -> None:
        await self._execute(
            lambda: self._redis.set(self._process_key(process.id), process.url, px=self._alive_ms)
        )

    async def leave(self, process: Process) -> None:
        await self._execute(lambda: self._redis.delete(self._process_key(process.id)))

    async def address_of(self, process_id: str) -> str | None:
        url: Any = await self._execute(lambda: self._redis.get(self._process_key(process_id)))
        return None if url is None else url.decode()

    async def write(self, process: Process, entries: Sequence[Entry]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        if not entries:
            await self.announce(process)
        for start in range(0, len(entries), _AT_ONCE):
            arguments = [self._prefix, process.id, process.url, self._alive_ms, self._log_ms]
            for entry in entries[start : start + _AT_ONCE]:
                arguments += [entry.call, entry.place, entry.epoch, int(entry.over), entry.at]
                arguments += [entry.head, entry.state, entry.body]
            response = await self._execute(lambda given=arguments: self._write(args=given))  # type: ignore[misc]
            outcomes += [outcome.decode() for outcome in response]
        return outcomes

    async def find(self, place: str) -> list[Log]:
        rows = await self._execute(lambda: self._find(args=[self._prefix, place]))
        found = []
        for call, owner, epoch, alive, url, head, state, body, age in rows:
            where = url.decode() if alive else None
            who = (call.decode(), owner.decode(), int(epoch), where)
            found.append(Log(*who, head, state, body, int(age) / 1e6))
        return sorted(found, key=lambda found: found.call)

    async def take_over(self, log: Log, process: Process) -> bool:
        arguments: list[Any] = [self._prefix, process.id, process.url, self._alive_ms, self._log_ms]
        arguments += [log.call, log.owner, log.epoch]
        return bool(await self._execute(lambda: self._claim(args=arguments)))

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._execute(lambda: self._redis.set(f"{self._prefix}value:{key}", value, px=_ms(ttl_s)))

    async def get(self, key: str) -> bytes | None:
        value: Any = await self._execute(lambda: self._redis.get(f"{self._prefix}value:{key}"))
        return None if value is None else bytes(value)

    async def publish(self, topic: str, message: bytes = b"") -> None:
        await self._execute(lambda: self._redis.publish(f"{self._prefix}topic:{topic}", message))

    async def listen(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        received_last = True
        while True:
            try:
                async with aclosing(self._messages(topics)) as messages:
                    async for news in messages:
                        received_last = True
                        yield news
            except (RedisError, OSError, TimeoutError) as error:
                # Not `_on_outage`: the server also drops slow listeners, and operations detect an outage themselves.
                self._failed_at = time.monotonic()
                if received_last:
                    log.warning(
                        "[bus] url: messages of other processes may be lost: %s", error or "no response"
                    )
                received_last = False
                await asyncio.sleep(_RETRY_S)

    async def _messages(self, topics: Sequence[str]) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield messages until the connection breaks."""
        names = {f"{self._prefix}topic:{topic}": topic for topic in topics}
        async with self._listening.pubsub() as channel:
            await channel.subscribe(*names)
            for topic in topics:
                yield topic, b""
            while True:
                # The timeout makes the loop try the connection again.
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=1.0)
                if message is not None:
                    yield names[message["channel"].decode()], message["data"]

    async def close(self) -> None:
        await self._redis.aclose()
        await self._listening.aclose()

    async def _execute(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Execute an operation within `[bus] timeout_s`. Raise BusUnavailable."""
        if self._unavailable and self.unbroken_s < _RETRY_S:
            raise BusUnavailable("the bus cannot be reached")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                response = await operation()
        except (RedisError, OSError, TimeoutError) as error:
            if time.monotonic() - began > self._settings.timeout_s + _STILL_S:
                raise BusUnavailable(
                    "this process was suspended while it waited for the bus", stood_still=True
                ) from error
            self._on_outage(error)
            raise BusUnavailable(f"the bus cannot be reached: {error or 'no response'}") from error
        if self._unavailable:
            self._unavailable = False
            log.info("the bus can be reached again")
        return response

    def _on_outage(self, error: Exception) -> None:
        self._failed_at = time.monotonic()
        if not self._unavailable:
            self._unavailable = True
            log.warning(
                "[bus] url: the bus cannot be reached; the gateway continues without it: %s",
                error or "no response",
            )

    def _process_key(self, process_id: str) -> str:
        return f"{self._prefix}process:{process_id}"

    @property
    def _alive_ms(self) -> int:
        return _ms(self._settings.heartbeat_ttl_s)

    @property
    def _log_ms(self) -> int:
        return _ms(self._settings.log_s)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
