"""A command that sends a request to a gateway reports what it waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import typer

from gateway.cli.options import fetch
from headgate.client import GatewayClient
from tests.harness.waiting import within


def test_a_gateway_that_takes_long_to_respond_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = asyncio.Event()
    texts: list[str] = []

    def echo(text: str, err: bool = False) -> None:
        texts.append(text)
        reported.set()

    async def slow(_client: GatewayClient) -> dict[str, Any]:
        async with within("the wait is reported", 60.0):
            await reported.wait()
        return {}

    monkeypatch.setattr(typer, "echo", echo)
    fetch("http://127.0.0.1:9", None, slow)
    assert texts == ["waiting for a response of the gateway at http://127.0.0.1:9"]
