"""No line of the log, at the level of --verbose, holds what a client, an engine or an upstream sent, or a key."""

from __future__ import annotations

import io
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp.web
import pytest
import pytest_asyncio
from sqlalchemy import Connection, text
from starlette.responses import JSONResponse, Response

from gateway.cli.logs import Formatter, safe_text
from gateway.engines.process import connect
from headgate.errors import EngineError
from headgate.processes.ports import free_port
from tests.harness.scripted import TOOLS
from tests.security.tenants import ROOT, UPSTREAM_KEY, Tenants, agent_key_of, bearer, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "xyzzy-the-prompt"
MESSAGES = [{"role": "user", "content": SECRET}]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Whatever is logged from INFO on, written as `gateway serve --verbose` writes it."""
    written, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(written), root.level
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    quiet = logging.getLogger("httpx")  # as the command does, and here it is the client
    quiet.setLevel(logging.WARNING)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


@pytest_asyncio.fixture(loop_scope="module")
async def quoting() -> AsyncIterator[str]:
    """An engine that refuses every request, and quotes it."""

    async def refuse(request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(status=400, text=f"invalid: {SECRET} {await request.text()}")

    app, port = aiohttp.web.Application(), free_port()
    app.router.add_route("*", "/{any:.*}", refuse)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def check(stage: Tenants, log: io.StringIO) -> str:
    written = log.getvalue()
    keys = (ROOT, UPSTREAM_KEY, key_of("bob"), agent_key_of("bob"), stage.bob.episode_key)
    for secret in (SECRET, "Guten", "arguments", *keys):
        assert secret not in written, written
    return written


async def test_calls_that_succeed_leave_no_words(stage: Tenants, log: io.StringIO) -> None:
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 4}),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 16}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ]
    for key in (stage.bob.episode_key, agent_key_of("bob")):
        for path, body in asks:
            response = await stage.gateway.http.post(
                path, headers=bearer(key), json={"model": "common", **body}
            )
            assert response.status_code == 200, response.text
        body = {"model": "oracle", "messages": MESSAGES}
        assert (
            await stage.gateway.http.post("/v1/chat/completions", headers=bearer(key), json=body)
        ).is_success
    check(stage, log)


async def test_requests_that_are_refused_leave_no_words(stage: Tenants, log: io.StringIO) -> None:
    body = {"model": "common", "messages": MESSAGES}
    for wrong in (
        {"temperature": SECRET},
        {SECRET: 1},
        {"messages": [{"role": SECRET}]},
        {"model": SECRET},
        {"n": 10**30},
    ):
        response = await stage.gateway.http.post(
            "/v1/chat/completions", headers=stage.bob.headers, json={**body, **wrong}
        )
        assert 400 <= response.status_code < 500
    for content in (b'{"' + SECRET.encode(), SECRET.encode() * 10**6):
        await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, content=content)
    for key in (SECRET, ROOT + SECRET):
        await stage.gateway.http.post("/v1/chat/completions", headers=bearer(key), json=body)
        await stage.gateway.http.get("/admin/v1/status", headers=bearer(key))
    bad = {"task_id": SECRET, "metadata": {SECRET: 10**400}, SECRET: SECRET}
    await stage.gateway.http.post("/admin/v1/episodes", headers=bearer(ROOT), json=bad)
    check(stage, log)


async def test_engines_that_fail_leave_no_words(stage: Tenants, log: io.StringIO, quoting: str) -> None:
    """The client gets the engine's words."""
    slot = stage.gateway.services.models.local["common"].pool.slots["common-0"]
    real, slot.engine = slot.engine, connect("common-0", quoting, "vllm")
    try:
        body = {"model": "common", "messages": MESSAGES}
        response = await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, json=body)
        assert response.status_code == 400 and SECRET in response.text
    finally:
        await slot.engine.close()
        slot.engine = real
    assert "400" in check(stage, log)


async def test_upstreams_that_fail_leave_no_words(
    stage: Tenants, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: dict[str, Any]) -> Response:
        return JSONResponse({"error": SECRET + UPSTREAM_KEY}, 500)

    monkeypatch.setattr(stage.elsewhere, "respond", fail)
    body = {"model": "oracle", "messages": MESSAGES}
    response = await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, json=body)
    assert response.status_code == 500
    check(stage, log)


async def test_an_unexpected_exception_leaves_no_words(
    stage: Tenants, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception may quote anything; a line of the log has its type, and its place."""

    async def stumble(*_: Any, **__: Any) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot render {SECRET}") from error

    recorder = stage.gateway.services.models.local["common"].recorder
    monkeypatch.setattr(recorder, "prepare", stumble)
    body = {"model": "common", "messages": MESSAGES}
    response = await stage.gateway.http.post("/v1/chat/completions", headers=stage.bob.headers, json=body)
    assert response.status_code == 500 and SECRET not in response.text
    written = check(stage, log)
    assert "ValueError" in written and "KeyError" in written and "in stumble" in written


async def test_the_database_quotes_no_rows(stage: Tenants, log: io.StringIO) -> None:
    def wrong(connection: Connection) -> None:
        connection.execute(text("insert into nothing values (:secret)"), {"secret": SECRET})

    try:
        await stage.gateway.services.database.submit(wrong)
        pytest.fail("the statement was wrong")
    except Exception:
        logging.getLogger("gateway.test").exception("a write failed")
    assert "OperationalError" in check(stage, log)


async def test_exceptions_among_arguments_are_logged_without_their_words() -> None:
    record = logging.makeLogRecord(
        {"msg": "%s, %r, %s", "args": (ValueError(SECRET), KeyError(SECRET), "kept")}
    )
    assert Formatter("%(message)s").format(record) == "ValueError, KeyError, kept"
    assert safe_text(EngineError("engine e: 400", quoted=SECRET)) == "EngineError: engine e: 400"
    assert safe_text(FileNotFoundError(2, "No such file", "/x")).endswith("'/x'")
