"""A version's bytes are read once, however often and by however many requests it is published."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gateway.control import versions
from gateway.updates.weights_check import Weights, read_weights
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, publish


async def test_requests_for_one_version_share_a_reading(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []
    may_go_on = threading.Event()

    def read(path: Path, version: int, base: Path | None = None, rank: int | None = None) -> Weights:
        readings.append(version)
        assert may_go_on.wait(60)
        return read_weights(path, version, base, rank)

    monkeypatch.setattr(versions, "read_weights", read)
    path = str(publish(fake_weights(tmp_path / "source", "one"), tmp_path / "v1", 1, 0))
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        gone = asyncio.create_task(gateway.admin.publish(1, path))
        await until(lambda: readings == [1], "the first request's reading")
        offers = [asyncio.create_task(gateway.admin.publish(1, path, wait_s=60)) for _ in range(2)]
        gone.cancel()
        await asyncio.wait({gone})
        may_go_on.set()
        assert [(await offer)["state"] for offer in offers] == ["live", "live"]
        assert readings == [1]
        Path(path, "model.safetensors").unlink()
        assert (await gateway.admin.publish(1, path))["state"] == "live", "answered from the record"
        assert readings == [1]
