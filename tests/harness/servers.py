"""Real servers for tests (see bench/servers.py). A machine that lacks one fails the test with what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench import servers
from bench.servers import PostgresServer, RedisServer, free_port
from examples.service.programs import NotInstalled

__all__ = ["PostgresServer", "RedisServer", "free_port", "postgres_server", "redis_server"]


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """Yield a running PostgreSQL server. `durable`: it waits for its disk; otherwise a crash of the machine loses data."""
    with _installed(), servers.postgres_server(durable=durable) as server:
        yield server


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Yield a running Redis server."""
    with _installed(), servers.redis_server() as server:
        yield server


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except NotInstalled as error:
        pytest.fail(str(error), pytrace=False)
