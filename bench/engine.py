"""`python -m bench.engine`: a bare mock engine in a process of its own, which costs a few microseconds a chunk.

It speaks vLLM's API, and Anthropic's messages, on a plain asyncio protocol, samples nothing and reads no prompt: every reply is
known beforehand (`bench.replies`), and its chunks are ready but for the request's id. What it sends:

- a stream: one token a chunk, each `--chunk-ms` after the one before, at the engine's own pace whatever the client does;
- a response that is not streamed, or a generation that fits into one chunk (`stream_interval`): immediately.

Replies end after `max_tokens`, or with `--chunks` tokens. `POST /bench/settings` changes `chunk_ms`, `chunks` and `tools` for
later requests. Owns its streams and the timer; one heap holds every stream that has something to send.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import httptools
import orjson

from bench.frames import (
    Chunks,
    chat_chunks,
    chat_whole,
    generate_chunks,
    generate_whole,
    message_chunks,
    message_whole,
)
from bench.replies import LOGPROB, TOOL_TOKENS, Reply, plain, with_tool

_EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The mock engine's replies and its speed."""

    chunk_ms: float = 5.0
    chunks: int = 64
    tools: bool = False
    routes: bool = False
    """Generations end with the experts of all tokens, the prompt's too, as those of a mixture."""

    def reply(self, max_tokens: int) -> Reply:
        """Return the reply to a request for `max_tokens` tokens."""
        if self.tools and max_tokens >= TOOL_TOKENS:
            return with_tool(TOOL_TOKENS)
        return plain(min(max_tokens, self.chunks), max_tokens > self.chunks)


class Stream:
    """A reply on its way; the engine's heap asks it for the next chunk when that is due."""

    def __init__(self, connection: Connection, name: str, chunks: Chunks, number: int) -> None:
        self.connection = connection
        self.name = name
        self.chunks = chunks
        self.sent = 0
        self.due = 0.0
        self._number = number

    def __lt__(self, other: Stream) -> bool:
        return (self.due, self._number) < (other.due, other._number)

    def send(self) -> bool:
        """Send the next chunk; whether another one follows."""
        self.connection.write(self.chunks.frame(self.sent, self.name))
        self.sent += 1
        return self.sent < len(self.chunks)


class Engine:
    """The streams that run, and what control endpoints change."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.label = "default"
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._queue: list[Stream] = []
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = count()
        self.chunks = lru_cache(256)(self._chunks)

    def start(self, connection: Connection, name: str, chunks: Chunks) -> None:
        """Begin a stream."""
        stream = Stream(connection, name, chunks, next(self._numbers))
        stream.due = self._loop.time() + (chunks.gap_s if len(chunks) > 1 else 0.0)
        heappush(self._queue, stream)
        self._schedule()

    def pause(self, abort: bool) -> None:
        """Send nothing more; what runs is aborted, or frozen."""
        self._paused = True
        if abort:
            self.abort({stream.name for stream in self._queue})

    def resume(self) -> None:
        """Send again; frozen streams are not in a hurry."""
        self._paused = False
        now = self._loop.time()
        for stream in self._queue:
            stream.due = max(stream.due, now)
        self._schedule()

    def abort(self, names: set[str]) -> int:
        """End streams, and return their number."""
        ended = [stream for stream in self._queue if stream.name in names]
        self._queue = sorted(stream for stream in self._queue if stream.name not in names)
        for stream in ended:
            stream.connection.write(stream.chunks.abort(stream.sent, stream.name, self.label))
        return len(ended)

    def control(self, path: str, query: dict[str, str], values: dict[str, Any]) -> tuple[int, Any]:
        """Return status and response of a path that generates nothing."""
        match path:
            case "/pause":
                self.pause(query.get("mode", "abort") == "abort")
            case "/resume":
                self.resume()
            case "/abort_requests":
                names = {name.removeprefix("generate-tokens-") for name in values["request_ids"]}
                return 200, {"aborted": self.abort(names)}
            case "/update_weight_version":
                self.label = values["new_version"]
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/server_info":
                routed = {"enable_return_routed_experts": self.settings.routes}
                config = {"model_config": {"enable_sleep_mode": False}, "aux_output_config": routed}
                return 200, {"vllm_config": config}
            case "/bench/settings":
                self.settings = replace(self.settings, **values)
            case "/health" | "/collective_rpc":
                pass
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": "bench", "object": "model", "created": 0}]}
            case _:
                return 404, {"error": {"message": f"no such path: {path}"}}
        return 200, {}

    def _chunks(
        self,
        settings: EngineSettings,
        form: str,
        max_tokens: int,
        interval: int,
        extra: str | bool,
        prompt: int = 0,
    ) -> Chunks:
        """Return the chunks of a reply. `extra`: a generation's label; for a chat, whether it requests its usage. `prompt`: the
        tokens of it whose experts a generation reports; 0: it reports none."""
        reply = settings.reply(max_tokens)
        gap_s = settings.chunk_ms / 1000
        if form == "chat":
            return chat_chunks(reply, gap_s, usage=bool(extra))
        if form == "message":
            return message_chunks(reply, gap_s)
        routed = prompt + len(reply.ids) - 1 if prompt else 0
        return generate_chunks(reply, gap_s, interval, str(extra), routed)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue and not self._paused:
            self._timer = self._loop.call_at(self._queue[0].due, self._send_due)

    def _send_due(self) -> None:
        """Send every chunk that is due. Due times are absolute: a late timer does not make an engine slower."""
        self._timer = None
        now, queue = self._loop.time() + 0.0005, self._queue
        while queue and queue[0].due <= now:
            stream = heappop(queue)
            if not stream.connection.closed and stream.send():
                stream.due += stream.chunks.gap_s
                heappush(queue, stream)
        self._schedule()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, engine: Engine) -> None:
        self.closed = False
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send bytes, unless there are none or the client has disconnected."""
        if data and self._transport is not None and not self.closed:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        try:
            values = orjson.loads(body) if body else {}
            self._respond(self._url.decode(), values)
        except (ValueError, KeyError, TypeError) as error:
            self._send(400, {"error": {"message": f"{type(error).__name__}: {error}", "code": 400}})

    def _respond(self, url: str, values: dict[str, Any]) -> None:
        match url:
            case "/inference/v1/generate":
                self._generate(values)
            case "/v1/chat/completions":
                self._chat(values)
            case "/v1/messages":
                self._message(values)
            case _:
                parts = urlsplit(url)
                self._send(*self._engine.control(parts.path, dict(parse_qsl(parts.query)), values))

    def _generate(self, values: dict[str, Any]) -> None:
        engine, params = self._engine, values["sampling_params"]
        max_tokens, name = params.get("max_tokens", 16), values.get("request_id", "generate")
        if values.get("stream"):
            interval = params.get("stream_interval") or 1
            start = params.get("routed_experts_prompt_start", 0)
            prompt = len(values["token_ids"]) - start if engine.settings.routes else 0
            chunks = engine.chunks(engine.settings, "generate", max_tokens, interval, engine.label, prompt)
            self.write(_EVENTS)
            engine.start(self, name, chunks)
            return
        response = generate_whole(engine.settings.reply(max_tokens), name, engine.label)
        if params.get("prompt_logprobs") is not None:
            scored = [{str(token): {"logprob": LOGPROB, "rank": 1}} for token in values["token_ids"][1:]]
            response["prompt_logprobs"] = [None, *scored]
        self._send(200, response)

    def _chat(self, values: dict[str, Any]) -> None:
        engine = self._engine
        max_tokens = values.get("max_completion_tokens") or values.get("max_tokens") or engine.settings.chunks
        if values.get("stream"):
            usage = bool((values.get("stream_options") or {}).get("include_usage"))
            chunks = engine.chunks(engine.settings, "chat", max_tokens, 1, usage)
            self.write(_EVENTS)
            engine.start(self, f"chatcmpl-{id(values):x}", chunks)
        else:
            self._send(200, chat_whole(engine.settings.reply(max_tokens)))

    def _message(self, values: dict[str, Any]) -> None:
        engine, max_tokens = self._engine, values["max_tokens"]
        if values.get("stream"):
            self.write(_EVENTS)
            engine.start(self, "", engine.chunks(engine.settings, "message", max_tokens, 1, ""))
        else:
            self._send(200, message_whole(engine.settings.reply(max_tokens)))

    def _send(self, status: int, value: Any) -> None:
        content = orjson.dumps(value)
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.write(head.encode() + content)


async def serve(port: int, settings: EngineSettings, ready: Callable[[], None] = lambda: None) -> None:
    """Listen on a loopback port until it is cancelled."""
    engine = Engine(settings)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    ready()
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve one mock engine."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--chunk-ms", type=float, default=5.0, help="milliseconds between two tokens (%(default)s)"
    )
    parser.add_argument("--chunks", type=int, default=64, help="the most tokens of a reply (%(default)s)")
    parser.add_argument(
        "--tools", action="store_true", help=f"replies of {TOOL_TOKENS} tokens that think and call a tool"
    )
    parser.add_argument("--routes", action="store_true", help="report the experts of tokens")
    options = parser.parse_args()
    if options.chunk_ms < 0 or options.chunks < 1:
        parser.error("--chunk-ms must not be negative, --chunks not below 1")
    settings = EngineSettings(options.chunk_ms, options.chunks, options.tools, options.routes)
    uvloop.run(serve(options.port, settings))


if __name__ == "__main__":
    main()
