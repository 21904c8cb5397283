"""The fake engine's barrier: what stands at it has sampled an exact number of tokens, and can be acted upon like what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from gateway.engines.fake import FakeEngine, create_fake_app, create_fake_sglang_app, identity, next_token
from tests.harness.waiting import turns

PROMPT = list(range(40, 60))


class Streams:
    """Requests without an end of their own, and the choices that each has returned."""

    def __init__(self, engine: FakeEngine, count: int, max_tokens: int = 12) -> None:
        self.choices: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._engine = engine
        self._max_tokens = max_tokens
        self.tasks = [asyncio.create_task(self._run(i), name=f"stream-{i}") for i in range(count)]

    async def _run(self, number: int) -> None:
        params = {"max_tokens": self._max_tokens, "stop_token_ids": [], "seed": number}
        body = {"request_id": f"r{number}", "token_ids": PROMPT, "sampling_params": params}
        async with aclosing(self._engine.generate(body)) as choices:  # type: ignore[type-var]
            async for choice in choices:
                self.choices[number].append(choice)

    @property
    def lengths(self) -> list[int]:
        return [sum(len(choice["token_ids"]) for choice in choices) for choices in self.choices]

    async def ends(self) -> list[str]:
        """Return the finish reason of each stream."""
        await asyncio.gather(*self.tasks)
        return [choices[-1]["finish_reason"] for choices in self.choices]


async def test_requests_stop_with_an_exact_number_of_tokens_and_the_barrier_moves() -> None:
    engine = FakeEngine("weights")
    engine.hold_after(3)
    streams = Streams(engine, 4)
    await engine.arrived(4)
    assert (streams.lengths, engine.held, engine.running, engine.sampled) == ([3] * 4, 4, 4, 12)
    engine.hold_after(5)
    assert engine.held == 0
    await engine.arrived(4)
    assert streams.lengths == [5] * 4
    engine.hold_after(0)
    assert engine.held == 4, "who is past the barrier stands at it"
    engine.release()
    assert engine.held == 0
    assert await streams.ends() == ["length"] * 4
    assert streams.lengths == [12] * 4


async def test_a_load_is_held_and_so_is_the_one_after_it() -> None:
    engine = FakeEngine("old")
    engine.set_faults({"hold_load": True})
    loads = [asyncio.create_task(engine.load(name), name=name) for name in ("one", "other")]
    await turns()  # both have begun, and would have ended
    assert engine.weights_id == identity("old")
    engine.set_faults({"hold_load": False})
    await asyncio.gather(*loads)
    assert engine.weights_id == identity("other")


async def test_held_requests_are_aborted_one_by_one() -> None:
    engine = FakeEngine("weights")
    engine.hold_after(2)
    streams = Streams(engine, 3)
    await engine.arrived(3)
    assert engine.abort(["r1", "unknown"]) == 1
    assert engine.held == 2
    await streams.tasks[1]
    assert engine.running == 2
    engine.release()
    assert await streams.ends() == ["length", "abort", "length"]
    assert streams.lengths == [12, 2, 12]


async def test_the_queue_is_not_at_the_barrier() -> None:
    engine = FakeEngine("weights")
    engine.set_faults({"slots": 2, "hold_after": 0})
    streams = Streams(engine, 5)
    await engine.arrived(2)
    assert (engine.held, engine.figures[:2]) == (2, (2, 3))
    engine.abort(["r0"])
    await streams.tasks[0]
    await engine.arrived(2)
    assert (engine.held, engine.figures[:2]) == (2, (2, 2))
    engine.release()
    assert await streams.ends() == ["abort", *["length"] * 4]


async def test_new_weights_take_effect_behind_the_barrier_with_the_next_token() -> None:
    engine = FakeEngine("old")
    engine.hold_after(4)
    streams = Streams(engine, 2)
    await engine.arrived(2)
    engine.pause(keep=True)
    await engine.load("new")
    engine.label = "new"
    engine.resume()
    assert engine.held == 2
    engine.release()
    assert await streams.ends() == ["length"] * 2
    for number, choices in enumerate(streams.choices):
        context = list(PROMPT)
        for place, choice in enumerate(choices):
            weights = identity("old" if place < 4 else "new")
            assert choice["token_ids"] == [next_token(weights, context, number, [])[0]]
            context += choice["token_ids"]
        assert [(s["version"], s["start"], s["end"]) for s in choices[-1]["weight_versions"]] == [
            ("default", 0, 4),
            ("new", 4, 12),
        ]


@pytest.mark.parametrize(
    ("create", "path", "body"),
    [
        (create_fake_app, "/inference/v1/generate", {"request_id": "r", "token_ids": PROMPT}),
        (create_fake_sglang_app, "/generate", {"rid": "r", "input_ids": PROMPT}),
    ],
)
async def test_both_apis_have_the_barrier_on_their_port(
    create: Callable[[FakeEngine], Any], path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine("weights")
    transport = httpx.ASGITransport(create(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        await http.post("/fake/faults", json={"hold_after": 2})
        params = {"max_tokens": 8, "max_new_tokens": 8}
        request = asyncio.create_task(
            http.post(path, json={**body, "sampling_params": params}), name="request"
        )
        await engine.arrived(1)
        state = (await http.post("/fake/state")).json()
        assert (state["held"], state["running"], state["sampled"]) == (1, 1, 2)
        await http.post("/fake/faults", json={"hold_after": None})
        assert (await request).is_success
        assert engine.sampled == 8
