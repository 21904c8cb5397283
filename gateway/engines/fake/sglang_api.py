"""SGLang's API in front of a fake engine, with the behavior of 0.5.23 that an adapter must handle (`gateway/engines/sglang.py`
lists them). The fake engine stands for SGLang's scheduler, `_Server` for what is in front of the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from gateway.engines.fake.engine import FakeEngine
from gateway.engines.fake.grammars import check_grammar
from gateway.engines.fake.serve import (
    App,
    Send,
    begin_events,
    create_app,
    end_events,
    gathered,
    no_such_path,
    send_event,
    send_json,
)


def create_fake_sglang_app(engine: FakeEngine, *, incremental: bool = False) -> App:
    """Return a bare ASGI application around one fake engine; `incremental` is `--incremental-streaming-output`."""
    server = _Server(engine, incremental)
    return create_app(engine, "/generate", server.respond, server.control, _metrics)


def _metrics(engine: FakeEngine) -> str:
    """Write the part of SGLang's metrics page that the gateway reads."""
    (running, waiting, kv), labels = engine.figures, 'engine_type="unified",model_name="fake"'
    return f"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{labels}}} {float(running)}
sglang:num_queue_reqs{{{labels}}} {float(waiting)}
sglang:num_used_tokens{{{labels}}} {float(kv)}
sglang:generation_tokens_total{{{labels}}} {float(engine.sampled)}
"""


class _Server:
    """The scheduler's queue, and the form of the responses."""

    def __init__(self, engine: FakeEngine, incremental: bool) -> None:
        self._engine = engine
        self._incremental = incremental
        self._paused = False
        """New requests wait here, where no abort reaches them."""
        self._known: set[str] = set()
        self._admitted = 0
        """Requests that the scheduler has and whose responses have not ended."""
        self._changed = asyncio.Event()

    async def control(self, path: str, query: dict[str, str], values: dict[str, Any]) -> tuple[int, Any]:
        """Everything but generations."""
        match path:
            case "/health":
                # A paused SGLang responds with 503 after 20 s, because its health check tries to sample.
                return (503 if self._engine.faults.sick or self._paused else 200), None
            case "/get_server_info":
                return 200, {"enable_memory_saver": self._engine.faults.sleep_mode}
            case "/ping":
                return (503 if self._engine.faults.sick else 200), None
            case "/pause_generation":
                await self._pause(values.get("mode", "abort"))
                return 200, {"status": "ok"}
            case "/continue_generation":
                self._resume()
                return 200, {"status": "ok"}
            case "/abort_request":
                self._abort(values.get("rid", ""), values.get("abort_all", False))
                return 200, None
            case "/flush_cache":
                return (200 if await self._flush(float(query.get("timeout", "0"))) else 400), None
            case "/release_memory_occupation":
                return await self._release()
            case "/resume_memory_occupation":
                if not self._engine.asleep:
                    return 500, {"error": {"message": "there is no memory to resume"}}
                await self._engine.wake()
                return 200, None
            case "/update_weights_from_disk":
                if not self._engine.awake():
                    return 500, {"error": {"message": "the memory is released"}}
                return await self._load(values)
            case "/update_weight_version":
                if values.get("abort_all_requests", True):
                    self._abort("", everything=True)
                self._engine.label = values["new_version"]
                return 200, {"success": True}
            case _:
                return no_such_path(path)

    async def _pause(self, mode: str) -> None:
        self._paused = True
        if mode == "abort":
            while self._admitted:
                self._abort("", everything=True)
                await self._until(lambda: not self._admitted, 0.05)
        else:
            self._engine.pause(keep=True, clear_cache=False)

    def _resume(self) -> None:
        self._engine.resume()
        self._paused = False
        self._wake()

    def _abort(self, rid: str, everything: bool) -> None:
        if not everything and rid not in self._known:
            return
        names = [name for name in self._known if everything or name.startswith(rid)]
        self._engine.abort(names)

    async def _flush(self, timeout_s: float) -> bool:
        """Clear the cache when nothing runs; queued requests count only where a time-out allows waiting for them."""

        await self._until(lambda: not self._engine.running, timeout_s)
        queued = self._engine.paused and not timeout_s
        if self._engine.running and not queued:
            return False
        self._engine.clear_cache()
        return True

    async def _release(self) -> tuple[int, Any]:
        if self._engine.running or self._engine.asleep:
            return 500, {"error": {"message": "the server is not idle, or has released its memory already"}}
        try:
            await self._engine.sleep(2)
        except RuntimeError as error:
            return 500, {"error": {"message": str(error)}}
        return 200, None

    async def _load(self, values: dict[str, Any]) -> tuple[int, Any]:
        await self._until(lambda: self._paused or not self._admitted)
        try:
            await self._engine.load(values["model_path"])
        except (RuntimeError, OSError) as error:
            return 400, {"success": False, "message": str(error)}
        if values.get("flush_cache", True) and not await self._flush(0.0):
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    @asynccontextmanager
    async def _admit(self, rid: str) -> AsyncIterator[None]:
        if rid in self._known:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        self._known.add(rid)
        try:
            await self._until(lambda: not self._paused)
            self._admitted += 1
            try:
                yield
            finally:
                self._admitted -= 1
                self._wake()
        finally:
            self._known.discard(rid)

    async def respond(self, body: dict[str, Any], send: Send) -> None:
        """Serve a generation."""
        if not self._engine.awake():
            await send_json(send, 503, {"error": {"message": "the memory is released"}})
            return
        if not body.get("stream"):
            await send_json(send, 200, await self._whole(body))
            return
        await begin_events(send)
        try:
            async with aclosing(self._events(body)) as events:
                async for event in events:
                    await send_event(send, event)
        except (ValueError, RuntimeError) as error:
            code = 400 if isinstance(error, ValueError) else 500
            await send_event(send, {"error": {"message": str(error), "code": code}})
        await end_events(send)

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._admit(body.get("rid") or f"request-{id(body)}"):
            *_, last = [choice async for choice in self._engine.generate(_native(body))]
            meta: dict[str, Any] = {"finish_reason": _reason(last), "weight_version": self._engine.label}
            if body.get("return_logprob") and body.get("logprob_start_len", -1) == 0:
                scores = await self._engine.score(body["input_ids"])
                meta["input_token_logprobs"] = [
                    [row[str(token)]["logprob"] if row else None, token, None]
                    for token, row in zip(body["input_ids"], scores, strict=True)
                ]
        return {"text": "", "output_ids": last["token_ids"], "meta_info": meta}

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        for name, kind in _GRAMMARS.items():
            if grammar := body["sampling_params"].get(name):
                check_grammar(kind, grammar)
        rows: list[list[Any]] = []
        async with (
            self._admit(body["rid"]),
            aclosing(gathered(self._engine, _native(body), first_at_once=True)) as choices,
        ):
            async for choice in choices:
                start = len(rows)
                rows += [
                    [entry["logprob"], entry["token_id"], None] for entry in choice["logprobs"]["content"]
                ]
                yield self._event(body["rid"], choice, rows, start if self._incremental else 0)

    def _event(self, rid: str, choice: dict[str, Any], rows: list[list[Any]], start: int) -> dict[str, Any]:
        queued = choice["finish_reason"] == "abort" and self._engine.paused
        meta = {
            "id": rid,
            "finish_reason": _reason(choice),
            "weight_version": self._engine.label,
            "completion_tokens": len(rows),
            "output_token_logprobs": rows if queued else rows[start:],
        }
        if choice["finish_reason"]:
            none = {"version": self._engine.label, "start": 0, "end": 0}
            meta["weight_versions"] = choice["weight_versions"] or [none]
        # A request that is aborted in the queue repeats its last token, although the stream is incremental.
        ids = [row[1] for row in (rows[-1:] if queued and start else rows[start:])]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}


def _native(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request in vLLM's form, which the fake engine uses."""
    params = body["sampling_params"]
    return {
        "request_id": body.get("rid"),
        "token_ids": body["input_ids"],
        "cache_salt": body.get("cache_salt") or "",
        "sampling_params": {
            "max_tokens": params.get("max_new_tokens", 128),
            "min_tokens": params.get("min_new_tokens"),
            "seed": params.get("sampling_seed"),
            "stop_token_ids": None if params.get("ignore_eos") else params.get("stop_token_ids"),
            "stream_interval": params.get("stream_interval"),
        },
    }


def _reason(choice: dict[str, Any]) -> dict[str, Any] | None:
    match choice["finish_reason"]:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": choice["token_ids"][-1]}
        case kind:
            return {"type": kind}
