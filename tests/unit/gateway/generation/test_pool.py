"""The pool of a model's engines, with any placer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gateway.config import QueueSettings
from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.generation.call import Call
from gateway.generation.call_runner import CallRunner
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Run, Slot
from gateway.generation.slot_placer import PlacementRequest, Placer, SlotPlacer
from headgate.errors import Unavailable
from headgate.types import Sampling
from tests.harness.waiting import turns, until, within
from tests.unit.gateway.generation.pool_calls import call, opened


class Wrong(SlotPlacer):
    """Return for every call an engine that is not open; fail after a million responses."""

    responses = 0

    def submit(self, request: PlacementRequest) -> None:
        self.responses += 1
        assert self.responses < 1_000_000, "no other task gets a turn"
        request.found.set_result(self._pool.slots["e"])


async def test_a_placer_that_errs_immediately_blocks_no_other_task() -> None:
    pool = EnginePool("demo", QueueSettings(max_wait_s=60.0))
    pool.slots["e"] = Slot("e")
    wrong = Wrong(pool)
    placer: Placer = wrong
    pool.set_placer(placer)
    call = Call("c", np.arange(3, dtype=np.int32), Sampling())
    asking = asyncio.create_task(pool.acquire(call), name="asking")
    await turns(11)
    before = wrong.responses
    assert 0 < before < 100
    pool.slots["e"].hold()
    pool.slots["e"].confirm(0)
    async with within("the call that waits gets the engine"):
        assert (await asking).name == "e"
    pool.slots["e"].hold()
    pool._queue = QueueSettings(max_wait_s=0.05)
    with pytest.raises(Unavailable, match="wait for an engine"):
        await pool.acquire(call)


class Counted(dict[str, Any]):
    """Count the entries that were looked through."""

    seen = 0

    def values(self) -> Any:
        return self._each(super().values())

    def items(self) -> Any:
        return self._each(super().items())

    def _each(self, entries: Any) -> Iterator[Any]:
        for entry in entries:
            self.seen += 1
            yield entry


class Busy:
    """An engine whose requests end when they are aborted."""

    def __init__(self) -> None:
        self.aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        await self.aborted.setdefault(request.request_id, asyncio.Event()).wait()
        yield TokenChunk([], [], "abort")

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted[request_id].set()


async def test_the_engine_of_a_call_is_known_without_a_scan_of_all_runs() -> None:
    pool = EnginePool("demo", QueueSettings())
    slot = pool.slots["e"] = Slot("e")
    engine = Busy()
    slot.engine = engine  # type: ignore[assignment]
    slot.hold()
    slot.confirm(0)
    calls = [Call(f"c{n}", np.arange(3, dtype=np.int32), Sampling()) for n in range(50)]
    runners = [CallRunner(call, pool) for call in calls]
    for runner in runners:
        runner.start(lambda: None)
    await until(lambda: len(engine.aborted) == len(calls), "all run")
    runs = slot.runs = Counted(slot.runs)
    assert {row["engine"] for row in pool.describe_calls()} == {"e"}
    slot.hold()
    async with within("every call is stopped"):
        await asyncio.gather(*(runner.stop() for runner in runners))
    assert runs.seen == 0
    assert all(aborted.is_set() for aborted in engine.aborted.values()), "each was aborted"
    assert not pool.describe_calls() and not slot.runs


async def test_an_engine_without_tokens_is_silent_and_a_stalled_call_moves() -> None:
    pool, now = EnginePool("demo", QueueSettings()), asyncio.get_running_loop().time()
    runs = {}
    for name in ("silent", "held", "idle", "stalled"):
        slot = pool.slots[name] = Slot(name)
        slot.hold()
        slot.confirm(0)
        slot.last_token_at = now - 100.0
        if name != "idle":
            call = Call(name, np.arange(3, dtype=np.int32), Sampling())
            runs[name] = slot.runs[name] = Run(call, slot, name, now - 200.0)
            runs[name].last_token_at, runs[name].scope = now - 100.0, Mock()
    pool.slots["held"].hold()
    pool.slots["stalled"].last_token_at = now
    assert pool.silent(90.0) == [pool.slots["silent"]]
    assert [name for name, run in runs.items() if run.cut_reason] == ["stalled"]
    assert runs["stalled"].call.hints.avoid == {"stalled"}


def test_a_pool_remembers_the_episodes_that_ran_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.generation.pool._REMEMBERED", 2)
    pool = EnginePool("demo", QueueSettings())
    engine = opened(pool, "e")
    a, b, c = (call(name) for name in "abc")
    for one in (a, b, a, c):
        pool.remember(one, engine)
    assert [pool.cached(one) for one in (a, b, c)] == [("e", 10), ("", 0), ("e", 10)]
