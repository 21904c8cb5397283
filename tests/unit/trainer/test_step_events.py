"""Steps are sent to those who watch, and training does not depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import httpx
import pytest

from headgate.client import GatewayClient
from tests.harness.waiting import result_of, turns, until
from trainer.loop import step_events
from trainer.loop.step_events import RunName, StepEvents

RUN = RunName("demo/trainer", "/runs/demo/trainer")


class Gateway:
    """Takes steps while it is let; `answers` sets what comes of the next ones."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, dict[str, float], str | None]] = []
        self.fails = False
        self.open = asyncio.Event()
        self.open.set()

    async def post_step(
        self, step: int, figures: Mapping[str, float], version: int, model: str | None, run: str, folder: str
    ) -> None:
        assert (run, folder) == ("demo/trainer", "/runs/demo/trainer")
        await self.open.wait()
        if self.fails:
            raise httpx.ConnectError("nobody there")
        self.steps.append((step, version, dict(figures), model))


def told_to(gateway: Gateway, said: list[str]) -> StepEvents:
    return StepEvents(cast(GatewayClient, cast(Any, gateway)), "policy", said.append, RUN)


async def test_steps_are_told_in_order_and_the_last_before_the_end() -> None:
    gateway = Gateway()
    steps = told_to(gateway, [])
    for number in range(3):
        steps.send(number, number + 1, {"loss": 0.5})
        await turns()
    steps.send(3, 4, {})
    await steps.finish()
    assert gateway.steps == [
        *((number, number + 1, {"loss": 0.5}, "policy") for number in range(3)),
        (3, 4, {}, "policy"),
    ]


async def test_failures_are_said_once_and_later_steps_are_told() -> None:
    gateway, said = Gateway(), list[str]()
    gateway.fails = True
    steps = told_to(gateway, said)
    for number in range(3):
        steps.send(number, number + 1, {})
        await turns()
    gateway.fails = False
    steps.send(3, 4, {})
    await until(lambda: len(gateway.steps) == 1, "the step is told")
    assert len(said) == 1
    assert "step 0" in said[0] and "nobody there" in said[0]


async def test_a_gateway_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_events, "_FINISH_S", 0.01)
    gateway = Gateway()
    gateway.open.clear()
    steps = told_to(gateway, [])
    for number in range(200):
        steps.send(number, number + 1, {})
    await turns()
    assert len(steps._waiting) <= 64
    await result_of(steps.finish(), "the run ends", 30)
    assert gateway.steps == []
