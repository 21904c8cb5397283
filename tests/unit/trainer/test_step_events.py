"""Steps are sent to the gateway for its watchers, and training does not depend on it."""

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
    """Accepts steps while it is open, and fails while `fails`."""

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
            raise httpx.ConnectError("no server")
        self.steps.append((step, version, dict(figures), model))


def events_to(gateway: Gateway, messages: list[str]) -> StepEvents:
    return StepEvents(cast(GatewayClient, cast(Any, gateway)), "policy", messages.append, RUN)


async def test_steps_are_sent_in_order_and_the_last_before_the_end() -> None:
    gateway = Gateway()
    steps = events_to(gateway, [])
    for number in range(3):
        steps.send(number, number + 1, {"loss": 0.5})
        await turns()
    steps.send(3, 4, {})
    await steps.finish()
    assert gateway.steps == [
        *((number, number + 1, {"loss": 0.5}, "policy") for number in range(3)),
        (3, 4, {}, "policy"),
    ]


async def test_failures_are_reported_once_and_later_steps_are_sent() -> None:
    gateway, messages = Gateway(), list[str]()
    gateway.fails = True
    steps = events_to(gateway, messages)
    for number in range(3):
        steps.send(number, number + 1, {})
        await turns()
    gateway.fails = False
    steps.send(3, 4, {})
    await until(lambda: len(gateway.steps) == 1, "the step is sent")
    assert len(messages) == 1
    assert "step 0" in messages[0] and "no server" in messages[0]


async def test_a_gateway_that_does_not_respond_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_events, "_FINISH_S", 0.01)
    gateway = Gateway()
    gateway.open.clear()
    steps = events_to(gateway, [])
    for number in range(200):
        steps.send(number, number + 1, {})
    await turns()
    assert len(steps._waiting) <= 64
    await result_of(steps.finish(), "the run ends", 30)
    assert gateway.steps == []
