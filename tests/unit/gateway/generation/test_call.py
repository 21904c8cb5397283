"""A call over scripted engines: the requests that it sends, and what the call does after each end of a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from unittest.mock import Mock

import numpy as np
import pytest

from gateway.config import QueueSettings
from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.generation.call import Call
from gateway.generation.call_runner import CallRunner
from gateway.generation.pool import EnginePool, NoMonitor
from gateway.generation.slot import Slot
from gateway.trajectories.turn import Span
from headgate.errors import EngineError, EngineRefused, EngineReplaced, EngineUnreachable, Unavailable
from headgate.types import FinishReason, Sampling
from tests.harness.waiting import turns, until, within

Reply = EngineError | tuple[list[int], FinishReason | None]


class Scripted:
    """Respond to each request with the next of `replies`, and record the requests; `account` is its own of each."""

    account: tuple[tuple[str, int], ...] | None = None
    top: list[list[tuple[int, float]]] | None = None
    """The alternatives that it reports with each chunk of as many tokens."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, EngineError):
            raise reply
        ids, finish = reply
        yield TokenChunk(ids, [-0.5] * len(ids), finish, self.account, self.top)


class Pool(EnginePool):
    """A pool of scripted engines `a`, `b` and so on, at version 3; records what is reported of them."""

    def __init__(self, *engines: Scripted, url: str | None = None) -> None:
        super().__init__("demo", QueueSettings())
        self.troubled: list[str] = []
        self.disputed: list[str] = []
        for name, engine in zip("abc", engines, strict=False):
            slot = self.slots[name] = Slot(name, url)
            slot.engine = engine  # type: ignore[assignment]
            slot.hold()
            slot.confirm(3)

    def report_unreachable(self, slot: Slot) -> None:
        self.troubled.append(slot.name)
        super().report_unreachable(slot)

    def report_disputed(self, slot: Slot, reason: str) -> None:
        self.disputed.append(f"{slot.name}: {reason}")

    def runner(self, max_failures: int = 5, **sampling: object) -> CallRunner:
        """Run a call with a prompt of two tokens."""
        given = Sampling(max_tokens=4, **sampling)  # type: ignore[arg-type]
        return CallRunner(Call("c", np.array([7, 8], np.int32), given), self)


async def ended(runner: CallRunner) -> Call:
    """Return the call when it has ended."""
    runner.start(lambda: None)
    async with within("the call is over"):
        await runner.wait()
    return runner.call


async def test_a_call_that_was_given_back_asks_for_what_is_left_after_all_that_it_has() -> None:
    engine = Scripted(([1], "abort"), ([2], "abort"), ([3], "stop"))
    call = await ended(Pool(engine).runner())
    assert [(r.request_id, r.prompt.tolist(), r.sampling.max_tokens) for r in engine.requests] == [
        ("c.0.0", [7, 8], 4), ("c.0.1", [7, 8, 1], 3), ("c.0.2", [7, 8, 1, 2], 2)
    ]  # fmt: skip
    assert {(r.cache_salt, r.label) for r in engine.requests} == {("v3", "")}
    assert (call.finish, call.turn.ids, call.turn.pauses) == ("stop", [1, 2, 3], 2)
    assert call.turn.spans == [Span(3, 3, 3)]


async def test_a_call_that_is_given_back_with_its_last_token_is_whole() -> None:
    engine = Scripted(([1, 2, 3, 4], "abort"))
    call = await ended(Pool(engine).runner())
    assert (call.finish, len(engine.requests)) == ("length", 1)


@pytest.mark.parametrize(("top_p", "requested", "kept"), [(0.9, 3, {0: (5, 6), 2: (5, 6)}), (1.0, 1, {})])
async def test_what_a_truncated_distribution_kept_is_requested_and_recorded(
    top_p: float, requested: int, kept: dict[int, tuple[int, ...]]
) -> None:
    engine = Scripted(([5], "abort"), ([9], "abort"), ([6], "stop"))
    engine.top = [[(5, math.log(0.5)), (6, math.log(0.5)), (7, -9999.0)]]
    sampling = Sampling(max_tokens=4, top_p=top_p, top_logprobs=1)
    call = await ended(CallRunner(Call("c", np.array([7, 8], np.int32), sampling, kept=3), Pool(engine)))
    assert {request.sampling.top_logprobs for request in engine.requests} == {requested}
    assert call.turn.kept == kept, "9 is not in the set that was reported with it"
    assert {len(row) for row in call.top} == {1}, "the client requested one"
    call.start_over()
    assert call.turn.kept == {}


@pytest.mark.parametrize(
    ("failure", "unreachable", "disputed"),
    [
        (EngineUnreachable("gone"), ["a"], []),
        (EngineError("an error in the middle"), [], []),
        (EngineReplaced("it has other weights"), [], ["a: it has other weights"]),
    ],
)
async def test_a_call_continues_in_another_engine_and_the_pool_knows_what_failed(
    failure: EngineError, unreachable: list[str], disputed: list[str]
) -> None:
    first, second = Scripted(failure), Scripted(([1], "stop"))
    pool = Pool(first, second)
    await ended(pool.runner())
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert (pool.troubled, pool.disputed) == (unreachable, disputed)


async def test_calls_whose_only_engine_died_wait_until_it_is_started_again() -> None:
    engine = Scripted(EngineUnreachable("gone"), ([1], "stop"))
    pool = Pool(engine)
    monitor = Mock(NoMonitor)
    monitor.unreachable.side_effect = lambda _model, slot: slot.fail("it died")
    pool.set_monitor(monitor)
    runner = pool.runner()
    runner.start(lambda: None)
    async with within("the call waits for an engine"):
        while not pool.waiting:
            assert not runner._ended.is_set()
            await turns(1)
        pool.slots["a"].start()
        pool.slots["a"].hold()
        pool.slots["a"].confirm(3)
        pool.notify()
        await runner.wait()
    call = runner.call
    assert (call.finish, call.turn.ids, len(engine.requests)) == ("stop", [1], 2)


async def test_an_engine_that_reports_another_version_is_disputed() -> None:
    engine = Scripted(([1], "stop"))
    engine.account = (("4", 1),)
    pool = Pool(engine, url="http://engine")
    call = await ended(pool.runner())
    assert call.turn.disputed
    assert pool.disputed == ["a: it reports that it does not run version 3"]


async def test_what_no_engine_would_take_is_tried_once() -> None:
    engine = Scripted(EngineRefused("such a token does not exist"))
    with pytest.raises(EngineRefused):
        await ended(Pool(engine, engine).runner())
    assert len(engine.requests) == 1


async def test_a_call_fails_with_the_last_of_its_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.generation.call_runner.MAX_FAILURES", 2)
    engine = Scripted(EngineError("first"), EngineError("second"), EngineError("third"))
    with pytest.raises(EngineError, match="second"):
        await ended(Pool(engine).runner())


async def test_external_engines_get_the_label() -> None:
    engine = Scripted(([1], "stop"))
    await ended(Pool(engine, url="http://engine").runner())
    assert [request.label for request in engine.requests] == ["3"]


@pytest.mark.parametrize("finish", ["abort", None])
async def test_a_seeded_call_starts_over_while_nothing_was_delivered(finish: FinishReason | None) -> None:
    first, second = Scripted(([1], finish)), Scripted(([5], "stop"))
    call = await ended(Pool(first, second).runner(seed=1))
    assert (call.turn.ids, call.restarts, call.finish) == ([5], 1, "stop")
    assert [(r.request_id, r.prompt.tolist(), r.sampling.max_tokens) for r in second.requests] == [
        ("c.1.0", [7, 8], 4)
    ]


async def test_a_seeded_call_of_which_something_was_delivered_is_lost_with_its_engine() -> None:
    runner = Pool(Scripted(([1], "abort"))).runner(seed=1)
    runner.call.mark_delivered()
    with pytest.raises(EngineError, match="a seed died, and part of its reply") as lost:
        await ended(runner)
    assert lost.value.code == "call_lost"


async def test_a_call_of_an_engine_that_is_updated_returns_to_it() -> None:
    engine = Scripted(([1], "abort"), ([2], "stop"))
    pool = Pool(engine)
    slot = pool.slots["a"]

    def hold() -> None:
        if call.turn.ids == [1]:
            slot.hold()

    runner = pool.runner()
    call = runner.call
    runner.start(hold)
    await until(lambda: call.hints.preferred == "a", "it waits for its engine", every_s=0)
    async with within("the call ends in its own engine"):
        slot.confirm(4)
        pool.notify()
        await runner.wait()
    assert [request.cache_salt for request in engine.requests] == ["v3", "v4"]
    assert call.turn.spans == [Span(3, 1, 3), Span(4, 1, 4)]


async def test_who_waits_for_a_call_that_is_stopped_hears_why() -> None:
    pool = Pool(Scripted())
    pool.slots["a"].hold()
    runner = pool.runner()
    runner.start(lambda: None)
    waiting = asyncio.create_task(runner.wait(), name="waiting")
    await turns(1)
    await runner.stop(Unavailable("the gateway is being stopped", retry_after=1.0))
    await runner.stop(Unavailable("again", retry_after=1.0))
    async with within("the call that waits is refused"):
        with pytest.raises(Unavailable, match="is being stopped"):
            await waiting
    assert not pool.calls
