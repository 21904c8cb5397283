"""Versions that come over HTTP: gateway, trainer's server and engines share no folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.engines.fake import FakeEngine, create_fake_app, identity
from headgate.processes.ports import free_port
from tests.harness.agents import agent
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.mirrors import serving
from tests.harness.records import check_everything
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, probe_of, write_manifest_of_pieces

KEY = "of-the-weights"


class Engine(FakeEngine):
    """A fake engine that keeps the path it was sent to load."""

    loaded = ""

    async def load(self, weights: str) -> None:
        await super().load(weights)
        self.loaded = weights


@dataclass
class World:
    """A gateway, the trainer's server, and three engines: two on their own machines, one on that of the gateway."""

    gateway: RunningGateway
    trainer: Path
    source: str
    engines: list[Engine]
    folders: list[Path]
    """The folders of the mirrors of the first two engines."""
    broken: set[str]
    """Names of mirrors that serve nothing but 500."""


@asynccontextmanager
async def world(model: Path, work: Path, **overrides: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines, urls = [Engine("none") for _ in range(3)], []
        for engine in engines:
            port = free_port()
            await stack.enter_async_context(serve(create_fake_app(engine), port))
            urls.append(f"http://127.0.0.1:{port}")
        broken: set[str] = set()

        def falters(name: str) -> Any:
            async def response(_request: web.Request) -> web.Response | None:
                return web.Response(status=500, text="out of order") if name in broken else None

            return response

        folders = [work / "machine-0", work / "machine-1"]
        mirrors = [
            await stack.enter_async_context(serving(folder, KEY, falters(folder.name))) for folder in folders
        ]
        source = await stack.enter_async_context(serving(work / "trainer", KEY, falters("trainer")))
        values = settings_for(
            model,
            work,
            engine={"launch": "external", "urls": urls, "mirrors": [*mirrors, ""], "max_restarts": 100},
            weights={"sources": [source], "dir": str(work / "gateway"), "key": KEY},
            **overrides,
        )
        gateway = await stack.enter_async_context(run_gateway(values, in_process=False))
        yield World(gateway, work / "trainer", source, engines, folders, broken)


def write(trainer: Path, version: int, before: Path) -> Path:
    folder = fake_weights(trainer / f"v{version:06d}", f"weights {version}")
    write_manifest_of_pieces(folder, version, version - 1, probe_of(folder, before))
    return folder


async def test_engines_elsewhere_run_what_the_trainer_wrote(tiny_model: Path, tmp_path: Path) -> None:
    async with world(tiny_model, tmp_path, update={"order": "rolling"}) as w:
        done = asyncio.Event()
        agents = [asyncio.create_task(agent(w.gateway, done, i), name=f"agent-{i}") for i in range(3)]
        written = {0: tiny_model.resolve()}
        for version in (1, 2):
            written[version] = write(w.trainer, version, written[version - 1])
            record = await w.gateway.admin.publish(version, wait_s=60, url=w.source)
            assert record["state"] == "live", record["why"]
            copies = [*(folder / written[version].name for folder in w.folders), Path(record["path"])]
            assert [engine.loaded for engine in w.engines] == [str(copy) for copy in copies]
            assert {identity(str(copy)) for copy in copies} == {identity(str(written[version]))}
        done.set()
        await check_everything(w.gateway, written, list(await asyncio.gather(*agents)))


async def test_an_engine_whose_mirror_fails_is_left_behind_and_comes_later(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with world(tiny_model, tmp_path) as w:
        w.broken.add("machine-1")
        written = write(w.trainer, 1, tiny_model)
        assert (await w.gateway.admin.publish(1, url=w.source))["state"] == "updating"
        slots = w.gateway.model.pool.slots
        await until(lambda: slots["demo-0"].version == 1, "the first engine's update")
        await until(lambda: "out of order" in slots["demo-1"].reason, "the second engine's failure")
        assert slots["demo-1"].state != "open"
        w.broken.add("trainer")
        w.broken.remove("machine-1")
        await until(
            lambda: slots["demo-1"].state == "open" and slots["demo-1"].version == 1,
            "the second one's update",
        )
        assert w.engines[1].loaded == str(w.folders[1] / written.name), "from the other mirror"
        assert (await w.gateway.admin.publish(1, wait_s=60, url=w.source))["state"] == "live"


async def test_a_source_that_is_away_is_a_503_and_a_bad_byte_a_422(tiny_model: Path, tmp_path: Path) -> None:
    async with world(tiny_model, tmp_path) as w:
        written = write(w.trainer, 1, tiny_model)
        body = {"version": 1, "url": w.source}
        w.broken.add("trainer")
        response = await w.gateway.http.post("/admin/v1/weights", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "weights_away")
        assert int(response.headers["retry-after"]) >= 1
        w.broken.clear()
        file = written / "model.safetensors"
        sound = file.read_bytes()
        file.write_bytes(sound[:-1] + b"x")
        response = await w.gateway.http.post("/admin/v1/weights", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "wrong_hash")
        file.write_bytes(sound)
        assert (await w.gateway.admin.publish(1, wait_s=60, url=w.source))["state"] == "live"


async def test_a_version_needs_one_source_that_the_settings_allow(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        for body, status, code in (
            ({}, 400, "invalid_value"),
            ({"path": "x", "url": "http://127.0.0.1:9"}, 400, "invalid_value"),
            ({"url": "http://127.0.0.1:9"}, 422, "url_not_allowed"),
        ):
            response = await gateway.http.post("/admin/v1/weights", json={"version": 1, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
