"""What a driver waits for: when it is reported, and when it gives up."""

from __future__ import annotations

import httpx
import pytest

from headgate.client import retry
from headgate.client.admin import GatewayRefused
from headgate.client.retry import GatewayUnreachable, RetryPolicy
from headgate.client.waits import Waits
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
    waits.set(1, "a slot")
    waits.set(2, "a slot")
    waits.set(3, "the gateway", urgent=True)
    assert reported[3:] == ["a slot", "the gateway"]


async def test_what_takes_long_is_reported_while_it_goes_on() -> None:
    reported: list[str] = []
    waits = Waits(reported.append)
    with waits.slow("a graders' answer", after_s=3600.0):
        await turns()
    assert reported == []
    with waits.slow("a graders' answer", after_s=0.0):
        await until(lambda: bool(reported), "it is reported")
    assert reported == ["a graders' answer", ""]


async def test_an_outage_is_reported_and_given_up_with_the_url_and_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "SILENT_S", 0.0)
    monkeypatch.setattr(retry, "_FIRST_BACKOFF_S", 0.01)
    reported: list[str] = []

    async def refuse() -> None:
        raise httpx.ConnectError("refused")

    message = r"http://g has not responded for 0\.05 s \(refused; step 'reward episode e1'\): start it again"
    with pytest.raises(GatewayUnreachable, match=message):
        await RetryPolicy("http://g", 0.05, Waits(reported.append)).call("reward episode e1", refuse)
    assert reported == [
        "the gateway at http://g, which has not responded for 0 s; the run ends after 0.05 s",
        "",
    ]


async def test_why_a_request_is_on_refusal_is_reported() -> None:
    reported, refusals = [], [GatewayRefused(503, "no disk", None, 0.01)]

    async def request() -> str:
        if refusals:
            raise refusals.pop()
        return "done"

    assert await RetryPolicy("http://g", 60.0, Waits(reported.append)).call("step", request) == "done"
    assert reported == ["no disk", ""]
