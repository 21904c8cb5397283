"""A full disk under a gateway: 503 with the reason until there is room; what was served is there, what had begun ends well."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.harness.barrier import arrived, hold_after, release
from tests.harness.disk import Disk
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.waiting import until

LONG = [{"role": "user", "content": "x" * 20_000}]


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_calls_are_refused_while_there_is_no_room_and_nothing_is_lost(
    tiny_model: Path, tmp_path: Path
) -> None:
    values = settings_for(
        tiny_model, tmp_path, models={"demo": {"path": str(tiny_model), "max_model_len": 30_000}}
    )
    async with run_gateway(values) as gateway:
        database, disk = gateway.services.database, Disk(gateway.services.database._engine)
        episode, headers = await gateway.open("a")
        before = await gateway.chat(headers, max_tokens=4)
        body = {"model": "m", "messages": LONG, "max_tokens": 4}
        await hold_after(gateway, 2)
        begun = asyncio.create_task(
            gateway.http.post("/v1/chat/completions", headers=headers, json=body), name="begun"
        )
        await arrived(gateway, 1)  # a write of the gateway's own may be the first that finds no room
        disk.fill()
        database._committer._drop()
        await release(gateway)
        await until(lambda: database._committer.full, "the disk is full")
        ready = await gateway.http.get("/readyz")
        assert code_of(ready) == (503, "store_full")
        assert "[store] url" in ready.json()["error"]["message"]
        refused = await gateway.http.post("/v1/chat/completions", headers=headers, json=body)
        assert code_of(refused) == (503, "store_full")
        assert int(refused.headers["retry-after"]) > 0
        opening = await gateway.http.post("/admin/v1/episodes", json={"task_id": "b"})
        assert code_of(opening) == (503, "store_full")
        assert not begun.done()
        disk.make_room()
        response = await begun
        assert response.status_code == 200
        assert (await gateway.http.get("/readyz")).status_code == 200
        calls = (await gateway.http.get(f"/admin/v1/episodes/{episode}")).json()["calls"]
        assert {call["id"] for call in calls} == {before.json()["id"], response.json()["id"]}
        await gateway.admin.reward(episode, 1.0)
