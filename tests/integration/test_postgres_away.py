"""A PostgreSQL server that dies and comes back, as clients see it: 503 and Retry-After, in their API's form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.servers import PostgresServer, postgres_server
from tests.harness.waiting import until

CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
"""Anthropic's API takes it, too."""


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server that the test may kill."""
    with postgres_server() as server:
        yield server


def code_of(response: httpx.Response) -> str:
    """Return the code of a refusal in OpenAI's form that has Retry-After."""
    assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error"), response.text
    assert int(response.headers["retry-after"]) >= 1
    return str(response.json()["error"]["code"])


async def test_clients_are_refused_with_retry_after_and_are_served_later(
    tiny_model: Path, tmp_path: Path, server: PostgresServer
) -> None:
    store = {"url": server.url(server.new_database()), "max_pending": 8, "read_wait_s": 5.0}
    async with run_gateway(settings_for(tiny_model, tmp_path, store=store)) as gateway:
        database = gateway.services.database
        episode, headers = await gateway.open()
        assert (await gateway.chat(headers)).status_code == 200
        await hold_after(gateway, 1)
        begun = asyncio.create_task(gateway.chat(headers), name="begun")
        await arrived(gateway, 1)
        await asyncio.to_thread(server.stop, "kill")
        try:
            await release(gateway)
            tree = gateway.model.recorder._trees[episode]
            await until(lambda: tree.pending == 1, "its turn is to be written")
            await until(lambda: not database.reachable, "the gateway misses its database")
            while database.pending < 8:
                database.put(lambda connection: None)
            await check_refusals(gateway, headers, episode)
            assert not begun.done(), "what had begun before it was known waits"
        finally:
            await asyncio.to_thread(server.start)
        assert (await begun).status_code == 200
        await until(lambda: database.pending == 0, "everything that waited is written")
        ready = await gateway.http.get("/readyz")
        assert ready.status_code == 200, ready.text
        assert (await gateway.chat(headers)).status_code == 200
        recorded = (await gateway.admin.episode(episode))["calls"]
        assert len(recorded) == 3, "no refused call was recorded, and no served one is missing"


async def check_refusals(gateway: RunningGateway, headers: dict[str, str], episode: str) -> None:
    """Everything that needs the store is refused: as many writes wait as may."""
    http = gateway.http
    assert code_of(await http.get("/readyz")) == "store_busy"
    assert code_of(await http.post("/v1/chat/completions", json=CHAT, headers=headers)) == "store_busy"
    stream = {**CHAT, "stream": True}
    assert code_of(await http.post("/v1/chat/completions", json=stream, headers=headers)) == "store_busy"
    body = {"model": "any", "input": "hi", "max_output_tokens": 4}
    assert code_of(await http.post("/v1/responses", json=body, headers=headers)) == "store_busy"
    assert code_of(await http.post("/admin/v1/episodes", json={"task_id": "t"})) == "store_busy"
    assert code_of(await http.get(f"/admin/v1/episodes/{episode}/trajectory")) == "store_down"

    anthropic = await http.post("/v1/messages", json=CHAT, headers=headers)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")
    assert int(anthropic.headers["retry-after"]) >= 1
