"""The shared part of the fake engine's APIs: bare ASGI, faults and state, and choices that come gathered and late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import fields
from typing import Any
from urllib.parse import parse_qsl

import orjson

from gateway.engines.fake.engine import FakeEngine
from gateway.engines.fake.faults import Faults

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Control = Callable[[str, dict[str, str], dict[str, Any]], Awaitable[tuple[int, Any]]]
"""Path, query and body to status and response."""
Respond = Callable[[dict[str, Any], Send], Awaitable[None]]
"""Return the body of a generation; cancelled when the client disconnects."""


def create_app(
    engine: FakeEngine,
    generate: str,
    respond: Respond,
    control: Control,
    metrics: Callable[[FakeEngine], str],
) -> App:
    """Return a bare ASGI application: `respond` serves the path `generate`, `metrics` /metrics, and `control` the rest."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _body(receive)
        values = orjson.loads(body) if body else {}
        path = scope["path"]
        if path == generate:
            await _while_connected(respond(values, send), receive)
            return
        if path == "/metrics":
            await send_json(send, 200, metrics(engine))
            return
        query = dict(parse_qsl(scope["query_string"].decode()))
        found = _fake_control(engine, path, values)
        status, value = found or await control(path, query, values)
        await send_json(send, status, value)

    return app


async def send_json(send: Send, status: int, value: Any) -> None:
    """Return a complete HTTP response: a text as it is, anything else as JSON; None is an empty one."""
    plain = isinstance(value, str)
    headers = [(b"content-type", b"text/plain; version=0.0.4" if plain else b"application/json")]
    body = b"" if value is None else value.encode() if plain else orjson.dumps(value)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def begin_events(send: Send) -> None:
    """Return the head of a stream of events."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_event(send: Send, value: Any) -> None:
    event = b"data: " + orjson.dumps(value) + b"\n\n"
    await send({"type": "http.response.body", "body": event, "more_body": True})


async def end_events(send: Send) -> None:
    """Return the end of a stream of events."""
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def no_such_path(path: str) -> tuple[int, Any]:
    """Return the response to an unknown route."""
    return 404, {"error": {"message": f"no such path: {path}"}}


async def gathered(
    engine: FakeEngine, body: dict[str, Any], *, first_at_once: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the choices as they are sent: `stream_interval` tokens in one."""
    interval = body["sampling_params"].get("stream_interval") or 1
    wanted = 1 if first_at_once else interval
    source = _late(engine, body) if engine.faults.lag_s else engine.generate(body)
    pending: dict[str, Any] | None = None
    async with aclosing(source) as choices:  # type: ignore[type-var]
        async for choice in choices:
            if pending is not None:
                choice["token_ids"] = pending["token_ids"] + choice["token_ids"]
                choice["logprobs"]["content"] = pending["logprobs"]["content"] + choice["logprobs"]["content"]
            pending = choice
            if choice["finish_reason"] or len(choice["token_ids"]) >= wanted:
                yield choice
                pending, wanted = None, interval


async def _late(engine: FakeEngine, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Delay sampled tokens by the fault `lag_s`; sampling does not wait for it."""
    sampled: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
    sampler = asyncio.create_task(_sample_into(sampled, engine, body), name="fake-engine-sampler")
    try:
        while True:
            at, choice = await _next_of(sampled, sampler)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            yield choice
            if choice["finish_reason"]:
                return
    finally:
        sampler.cancel()
        await asyncio.wait({sampler})


async def _sample_into(
    late: asyncio.Queue[tuple[float, dict[str, Any]]], engine: FakeEngine, body: dict[str, Any]
) -> None:
    async with aclosing(engine.generate(body)) as choices:  # type: ignore[type-var]
        async for choice in choices:
            late.put_nowait((time.monotonic() + engine.faults.lag_s, choice))


async def _next_of(
    late: asyncio.Queue[tuple[float, dict[str, Any]]], sampler: asyncio.Task[None]
) -> tuple[float, dict[str, Any]]:
    """Return the next choice; raise what ended the sampler, once everything that it sampled was sent."""
    while late.empty() and not sampler.done():
        getter = asyncio.ensure_future(late.get())
        await asyncio.wait({getter, sampler}, return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
        getter.cancel()
    if late.empty():
        sampler.result()
    return late.get_nowait()


def _fake_control(engine: FakeEngine, path: str, values: dict[str, Any]) -> tuple[int, Any] | None:
    """Return the paths that no real engine has."""
    if path == "/fake/faults":
        known = {f.name for f in fields(Faults)}
        if not values.keys() <= known:
            return 400, {"error": {"message": f"known faults: {sorted(known)}"}}
        engine.set_faults(values)
        return 200, {}
    if path == "/fake/state":
        names = ("running", "held", "sampled", "asleep", "sleeps", "refused", "received_frames")
        found = {name: getattr(engine, name) for name in names}
        cached = {"prefix_hits": engine.cache.hits, "stale_hits": engine.cache.stale_hits}
        return 200, found | cached | {"adapters": list(engine.adapters)}
    return None


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    disconnected = asyncio.create_task(_disconnected(receive), name="fake-engine-disconnect")
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({disconnected, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.gather(disconnected, task, return_exceptions=True)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
