"""Upstream models: addresses come from the configuration alone, keys stay here, and redirections are not followed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp.web
import pytest
import pytest_asyncio
from starlette.responses import JSONResponse, Response

from gateway.engines.http import EngineHTTP
from headgate.errors import EngineError
from headgate.processes.ports import free_port
from tests.harness.upstream import EVENTS, events, whole_or_streamed
from tests.security.tenants import ROOT, UPSTREAM_KEY, Tenants, bearer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def attacker() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that must get no request, and the requests that it got."""
    heard: list[str] = []

    async def hear(request: aiohttp.web.Request) -> aiohttp.web.Response:
        heard.append(f"{request.headers} {await request.text()}")
        return aiohttp.web.json_response({"reward": 1, "taken": True})

    app, port = aiohttp.web.Application(), free_port()
    app.router.add_route("*", "/{any:.*}", hear)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession() as session:
        await session.get(f"http://127.0.0.1:{port}/are-you-there")
    assert len(heard) == 1  # it does hear
    heard.clear()
    yield f"http://127.0.0.1:{port}", heard
    await runner.cleanup()


async def test_requests_name_no_addresses(stage: Tenants, attacker: tuple[str, list[str]]) -> None:
    """CVE-2024-6587: `api_base` in a body sent the key to the host that was named there."""
    url, heard = attacker
    stage.elsewhere.respond = whole_or_streamed
    stage.elsewhere.requests.clear()
    for name in (
        "api_base",
        "base_url",
        "api_url",
        "endpoint",
        "url",
        "host",
        "proxy",
        "custom_llm_provider",
    ):
        for model in ("oracle", "common"):
            body = {"model": model, "messages": MESSAGES, "max_tokens": 4, name: url}
            headers = {**stage.bob.headers, "x-api-base": url, "x-forwarded-host": url}
            response = await stage.gateway.http.post("/v1/chat/completions", headers=headers, json=body)
            assert response.status_code == (200 if model == "oracle" else 400), (name, model, response.text)
    assert heard == [] and len(stage.elsewhere.requests) == 8
    assert all(
        headers["authorization"] == f"Bearer {UPSTREAM_KEY}" for headers, _ in stage.elsewhere.requests
    )


async def test_redirections_are_not_followed(stage: Tenants, attacker: tuple[str, list[str]]) -> None:
    url, heard = attacker
    for code in (301, 302, 307, 308):

        async def redirect(_: dict[str, Any], code: int = code) -> Response:
            return Response("elsewhere", code, {"location": f"{url}/v1/chat/completions"})

        stage.elsewhere.respond = redirect
        body = {"model": "oracle", "messages": MESSAGES}
        response = await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, json=body)
        assert response.status_code == code and "location" not in response.headers
    assert heard == []


async def test_engines_are_not_followed_elsewhere(attacker: tuple[str, list[str]]) -> None:
    url, heard = attacker
    app, port = aiohttp.web.Application(), free_port()

    async def redirect(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(status=307, headers={"location": f"{url}/generate"})

    app.router.add_route("*", "/{any:.*}", redirect)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    engine = EngineHTTP("e", f"http://127.0.0.1:{port}", 5.0)
    try:
        with pytest.raises(EngineError):
            await engine.post("/pause", {"prompt": "secret"})
        with pytest.raises(EngineError):
            async for _ in engine.events("/generate", {"prompt": "secret"}):
                pass
        assert not await engine.returns_ok("/health", 5.0)
    finally:
        await engine.close()
        await runner.cleanup()
    assert heard == []


@pytest.mark.parametrize("stream", [False, True])
async def test_upstream_keys_reach_no_client(stage: Tenants, stream: bool) -> None:
    """Also where the upstream quotes the key, as some do when they refuse it."""

    async def quoting(body: dict[str, Any]) -> Response:
        words = f"Incorrect API key provided: {UPSTREAM_KEY}"
        if body.get("stream"):
            chunk = {"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": None}]}
            return events([b"data: " + json.dumps(chunk).encode() + b"\n\n", EVENTS])
        return JSONResponse({"error": {"message": words}}, 401, {"x-key": UPSTREAM_KEY})

    stage.elsewhere.respond = quoting
    body = {"model": "oracle", "messages": MESSAGES, "stream": stream}
    response = await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, json=body)
    assert "Incorrect API key provided: ***" in response.text
    assert UPSTREAM_KEY not in response.text and UPSTREAM_KEY not in str(response.headers)
    path = f"/admin/v1/episodes/{stage.bob.names['episode_id']}"
    calls = (await stage.gateway.http.get(path, headers=bearer(ROOT))).json()["calls"]
    last = [call["id"] for call in calls if call["id"].startswith("upstream-")]
    for call in last:
        exchange = await stage.gateway.http.get(f"{path}/calls/{call}/exchange", headers=bearer(ROOT))
        assert UPSTREAM_KEY not in exchange.text
