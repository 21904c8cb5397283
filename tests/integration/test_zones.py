"""Engines in three zones behind a slow link: a version goes over it once for each zone, and then from mirror to mirror."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.processes.ports import free_port
from tests.harness.gateways import run_gateway, serve, settings_for
from tests.harness.mirrors import serving
from tests.harness.weights import fake_weights, probe_of, write_manifest_of_pieces

ZONES = ("a", "b", "c")
LINK_S = 0.25
"""The time that a request to the source takes longer than one to a mirror."""


@pytest.mark.parametrize("engines", [9, pytest.param(64, marks=pytest.mark.long)])
async def test_each_zone_fetches_a_version_once(tiny_model: Path, tmp_path: Path, engines: int) -> None:
    requested: Counter[tuple[str, str]] = Counter()

    async def link(request: web.Request) -> web.Response | None:
        requested[request.path, request.headers.get("Range", "")] += 1
        await asyncio.sleep(LINK_S)  # noqa: TID251 - simulates the link
        return None

    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(serving(tmp_path / "trainer", first=link))
        nodes: dict[str, dict[str, Any]] = {
            zone: {"tags": ["rollout"], "zone": zone, "urls": [], "mirrors": []} for zone in ZONES
        }
        for number in range(engines):
            port, node = free_port(), nodes[ZONES[number % len(ZONES)]]
            await stack.enter_async_context(serve(create_fake_app(FakeEngine("none")), port))
            node["urls"].append(f"http://127.0.0.1:{port}")
            mirror = serving(tmp_path / f"machine-{number}")
            node["mirrors"].append(await stack.enter_async_context(mirror))
        values = settings_for(
            tiny_model,
            tmp_path,
            engine={"launch": "fake", "count": 0},
            nodes=nodes,
            weights={"sources": [source], "dir": str(tmp_path / "gateway")},
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        written = fake_weights(tmp_path / "trainer" / "v000001", "weights 1")
        write_manifest_of_pieces(written, 1, 0, probe_of(written, tiny_model))
        distribution, began = gateway.model.versions._distribution, time.monotonic()
        spread, seconds = distribution.spread, []

        async def timed(*given: Any) -> None:
            start = time.monotonic()
            await spread(*given)
            seconds.append(time.monotonic() - start)

        distribution.spread = timed  # type: ignore[method-assign]
        record = await gateway.admin.publish(1, wait_s=60, url=source)
        assert record["state"] == "live", record["why"]
        assert len([*tmp_path.glob("machine-*/v000001")]) == engines
    assert requested and {*requested.values()} == {1 + len(ZONES)}, (
        "the gateway and each zone, each piece once"
    )
    print(
        f"{engines} engines: {seconds[0]:.2f} s to the last mirror, {time.monotonic() - began:.2f} s in all"
    )
