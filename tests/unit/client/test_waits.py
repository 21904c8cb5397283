"""What a driver waits for: when it is reported, and when it gives up."""

from __future__ import annotations

import httpx
import pytest

from gateway.client import patience
from gateway.client.admin import GatewayRefused
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
