"""The fake engine with measured steps: its tokens take as long as the formula states, and it counts what it prefills."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.round_robin import in_turn
from bench.routing import ARMS, Setup
from bench.slow_trainer import Load
from bench.timed_engine import Costs, TimedEngine
from gateway.config.settings import Settings
from scheduler.policies.open_engines import Engines
from scheduler.policies.placement import Choice
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import Arrived
from tests.faults.virtual.clock import Clock, VirtualLoop

COSTS = Costs(EngineModel(0.0, 0.25, 0.125, 0.25), 0.01)
"""A step takes half a second up to two calls."""


def body(name: str, ids: list[int], tokens: int) -> dict[str, Any]:
    return {"request_id": name, "token_ids": ids, "sampling_params": {"max_tokens": tokens}}


async def sampled(engine: TimedEngine, *given: Any) -> list[int]:
    return [token async for choice in engine.generate(body(*given)) for token in choice["token_ids"]]


def test_tokens_take_as_long_as_steps_and_prefills_do(tiny_model: Path) -> None:
    clock = Clock(0.0)
    loop = VirtualLoop(clock)
    engine = TimedEngine(str(tiny_model), COSTS)
    first = loop.run(sampled(engine, "a.0.0", list(range(32)), 4), 100.0)
    assert (len(first), round(clock.now, 3)) == (4, 0.32 + 4 * 0.5)
    assert (engine.prefilled, engine.recomputed) == (32, 0)
    cached = [*range(32), *first]
    began = clock.now
    loop.run(sampled(engine, "b.0.0", cached, 2), 100.0)
    assert engine.prefilled == 32 + 4, "two blocks of its prompt are cached"
    assert round(clock.now - began, 3) == 0.04 + 2 * 0.5
    loop.run(sampled(engine, "c.0.7", list(range(100, 120)), 1), 100.0)
    assert engine.recomputed == 20, "seven tokens of it were sampled elsewhere"
    loop.end()


def test_requests_wait_for_one_anothers_prefills_and_share_steps(tiny_model: Path) -> None:
    clock = Clock(0.0)
    loop = VirtualLoop(clock)
    engine = TimedEngine(str(tiny_model), COSTS)

    async def both() -> None:
        await asyncio.gather(*(sampled(engine, f"{name}.0.0", [n] * 16, 1) for n, name in enumerate("abc")))

    loop.run(both(), 100.0)
    assert round(clock.now, 3) == 3 * 0.16 + 3 * 0.125 + 0.25, "three calls take longer than two"
    loop.end()


def test_in_turn_means_every_engine_that_may_whatever_runs_there() -> None:
    engines = Engines(Choice("cached"))
    for name, version in (("a", 1), ("b", 0), ("c", 1)):
        engines.opened(name, version, EngineModel())
    for _ in range(5):
        engines.add_call("c", 1, 10)
    chosen = [in_turn(engines, Arrived("x", version, 10)) for version in (0, 0, 0, 1, 1, 0, 2)]
    assert [engine.name if engine else None for engine in chosen] == ["a", "b", "c", "a", "c", "b", None]


@pytest.mark.parametrize("launch", ["fake", "vllm"])
@pytest.mark.parametrize("arm", ARMS)
def test_the_settings_of_every_arm_are_valid(arm: str, launch: str) -> None:
    load = Load(2, 8, 4, 16, 0.0, 32, 1.0, 1)
    setup = Setup(launch, 2, 20.0, 1, 2, 2, load)
    tables = tomllib.loads(setup.tables(arm, ["http://127.0.0.1:1", "http://127.0.0.1:2"]))
    settings = Settings.parse({"models": {"bench": {"path": "/m"}}, **tables})
    assert settings.engine.launch == ("external" if launch == "fake" else "vllm")
    assert settings.routing.rule == ("gain" if "gain" in arm else "cached")
    assert settings.update.order == ("pull" if "pull" in arm else "rolling")
    assert settings.routing.group_version == ("engine" if arm.endswith("_v") else "newest")
    assert (settings.routing.engine_prior.s_per_step == 0.0044 * 20) == (launch == "fake")
