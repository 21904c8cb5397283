"""Slow loads and stuck ones."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gateway.updates.load_watch import LoadWatch, describe
from headgate.errors import EngineError, WeightsMissed

pytestmark = pytest.mark.anyio
_GB = 10**9


def _watch() -> LoadWatch:
    return LoadWatch(stuck_s=0.02, look_s=0.001)


async def test_a_load_that_reads_may_take_any_time() -> None:
    loaded, bytes_ = asyncio.Event(), itertools.count()

    def count() -> int:
        if (found := next(bytes_)) == 60:  # three times the seconds of a stuck load
            loop.call_soon_threadsafe(loaded.set)
        return found

    async def work() -> None:
        await loaded.wait()

    loop = asyncio.get_running_loop()
    await _watch().load("a", work(), _GB, count)


@pytest.mark.parametrize(("read", "kind"), [(_GB // 4, WeightsMissed), (2 * _GB, EngineError)])
async def test_a_stuck_load_ends_with_its_bytes_and_blames_the_version_only_if_these_came(
    read: int, kind: type[EngineError]
) -> None:
    counts = itertools.chain([0], itertools.repeat(read))
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(EngineError, match=rf"a is stuck: it has read {read / _GB:.2f} of 1\.00 GB") as error:
        await _watch().load("a", work(), _GB, lambda: next(counts))
    assert type(error.value) is kind
    assert cancelled.is_set()


async def test_an_engine_whose_bytes_are_not_seen_has_its_deadline_alone() -> None:
    loaded = asyncio.Event()

    async def work() -> None:
        await loaded.wait()

    def count() -> None:
        loop.call_soon_threadsafe(loaded.set)

    loop = asyncio.get_running_loop()
    await _watch().load("a", work(), _GB, count)


async def test_an_error_of_the_load_is_raised() -> None:
    async def work() -> None:
        raise EngineError("no such file")

    with pytest.raises(EngineError, match="no such file"):
        await _watch().load("a", work(), _GB, lambda: 0)


def test_the_rate_is_named() -> None:
    assert describe(5 * _GB, 16 * _GB, 50.0) == "it has read 5.00 of 16.00 GB, at 100 MB/s"
