"""What a driver waits for: when it is reported, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from gateway.client import closings, patience
from gateway.client.admin import GatewayClient, GatewayRefused
from gateway.client.closings import Closings
from gateway.client.patience import GatewayUnreachable, Patience
from gateway.client.waits import Waits
from tests.harness.waiting import turns, until


def test_the_most_common_reason_is_reported_when_it_changes() -> None:
    reported: list[str] = []
    waits = Waits(reported.append)
    for who, reason in (
        (1, "a slot"),
        (2, "a slot"),
        (3, "an engine"),
        (1, ""),
        (2, "an engine"),
        (3, ""),
        (2, ""),
    ):
        waits.set(who, reason)
    assert reported == ["a slot", "an engine", ""]


async def test_what_takes_long_is_reported_while_it_goes_on() -> None:
    reported: list[str] = []
    waits = Waits(reported.append)
    with waits.slow("a graders' answer", after_s=3600.0):
        await turns()
    assert reported == []
    with waits.slow("a graders' answer", after_s=0.0):
        await until(lambda: bool(reported), "it is reported")
    assert reported == ["a graders' answer", ""]


async def test_a_gateway_that_is_gone_is_reported_and_given_up_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "SILENT_S", 0.0)
    monkeypatch.setattr(patience, "_FIRST_BACKOFF_S", 0.01)
    reported: list[str] = []

    async def refuse() -> None:
        raise httpx.ConnectError("refused")

    with pytest.raises(GatewayUnreachable, match=r"step 'reward episode e1': no answer for 0\.05 s"):
        await Patience(0.05, Waits(reported.append)).insist("reward episode e1", refuse)
    assert reported == ["the gateway to answer (step 'reward episode e1')", ""]


async def test_why_a_request_is_sent_away_is_reported() -> None:
    reported, refusals = [], [GatewayRefused(503, "no disk", None, 0.01)]

    async def request() -> str:
        if refusals:
            raise refusals.pop()
        return "done"

    assert await Patience(60.0, Waits(reported.append)).insist("reward episode e1", request) == "done"
    assert reported == ["no disk", ""]


def test_a_cause_is_reported_before_what_follows_from_it() -> None:
    reported: list[str] = []
    waits = Waits(reported.append)
    waits.set(1, "agents to finish")
    waits.set(2, "agents to finish")
    waits.set(3, "the gateway", cause=True)
    waits.set(3, "")
    assert reported == ["agents to finish", "the gateway", "agents to finish"]


class Events:
    """A gateway of which only the stream of events is used, until it is gone."""

    url = "http://gateway"
    last = 1

    def __init__(self) -> None:
        self.gone = False

    def events(self, *_: object, **__: object) -> Events:
        return self

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        if self.gone:
            raise httpx.ConnectError("refused")
        for event in ():
            yield event


async def test_a_gateway_that_dies_while_agents_work_is_reported_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closings, "_AGAIN_S", 0.0)
    monkeypatch.setattr(closings, "SILENT_S", 0.0)
    reported: list[str] = []
    events = Events()
    watched = Closings(cast(GatewayClient, events), None, Waits(reported.append))
    await watched.begin()
    watching = asyncio.create_task(watched.watch(), name="closings")
    events.gone = True
    await until(lambda: bool(reported), "the gateway is reported")
    events.gone = False
    await until(lambda: reported[-1] == "", "it is back")
    watching.cancel()
    assert reported == ["the gateway at http://gateway, which does not respond", ""]
