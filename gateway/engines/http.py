"""HTTP to engines: JSON in, JSON or server-sent events out, and every failure as one of the gateway's errors.

Owns one engine's connections. A status that blames the request becomes EngineRefused; 503 and broken connections become
EngineUnreachable; any other failure, and a redirection, EngineError. Streams of events have connections of their own
(`streams.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import orjson

from gateway.engines.streams import CONNECT_S, StreamConnection, StreamConnections
from headgate.errors import EngineError, EngineRefused, EngineUnreachable, NotComparable
from headgate.http import ERRORS, Session
from headgate.types import FinishReason
from scheduler.policies.proof import Holding

_CONTROL_S = 600.0
"""The longest that a request other than a generation may take; loading weights is the longest of them."""
_BLAMES_THE_REQUEST = {400, 413, 422}
_JSON = {"content-type": "application/json", "accept-encoding": "identity"}

FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
"""The reasons that engines give for the end of a request."""


class HTTPEngine:
    """The shared base of all HTTP engines. Owns the connections to one."""

    def __init__(self, name: str, http: EngineHTTP) -> None:
        self.name = name
        self._http = http

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def workers(self) -> int:
        raise self._no_transfer()

    async def devices(self) -> list[dict[str, str]]:
        raise self._no_transfer()

    async def receive(self, join: dict[str, Any]) -> None:
        raise self._no_transfer()

    async def receive_weights(self, version: int, timeout_s: float) -> None:
        raise self._no_transfer()

    async def load_adapter(self, name: str, path: str) -> None:
        raise self._no_transfer()

    async def unload_adapter(self, name: str) -> None:
        raise self._no_transfer()

    async def forget_adapters(self) -> None:
        raise self._no_transfer()

    async def prove(self, version: int, path: str, adapter: str = "") -> list[Holding]:
        raise NotComparable(
            f"engine {self.name}: headgate has no means to compare the weights of an engine of this API"
        )

    def _no_transfer(self) -> EngineError:
        return EngineError(
            f"engine {self.name} takes weights from folders alone: set [engine] transport = 'files'"
        )

    def _cut_off(self) -> EngineUnreachable:
        return EngineUnreachable(f"engine {self.name} ended a stream without a finish reason")


def version_spans(spans: list[dict[str, Any]] | None) -> tuple[tuple[str, int], ...] | None:
    """Return the label of each version that sampled, and its number of tokens; None if the engine does not report them."""
    if spans is None:
        return None
    return tuple(
        (span["version"], span["end"] - span["start"]) for span in spans if span["end"] > span["start"]
    )


_LONG_EVENT = 2**16
"""Bytes from which an event is joined once: the routes of a long prompt take megabytes, and come in many pieces."""


class EngineHTTP:
    """The connections to one engine. A stream of events may be silent for `silence_s`."""

    def __init__(self, name: str, base_url: str, silence_s: float) -> None:
        self._name = name
        self._base_url = base_url.rstrip("/")
        self._streams = StreamConnections(self._base_url, silence_s)
        self._control = Session(_JSON, connect_s=CONNECT_S, total_s=_CONTROL_S)

    async def post(self, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> bytes:
        """Post a JSON object; return the body."""
        return await self._request("POST", path, params=params, data=None if body is None else _dump(body))

    async def get(self, path: str) -> bytes:
        """Return the body of a GET."""
        return await self._request("GET", path)

    async def _request(self, method: str, path: str, **options: Any) -> bytes:
        with self._translated(path):
            async with self._control.request(method, self._base_url + path, **options) as response:
                content = await response.read()
                if response.status >= 300:
                    raise self._refusal(path, response.status, content)
                return content

    async def events(
        self, path: str, body: Any, on_new: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Post a JSON object, and yield the events of the response until `[DONE]`.

        If the response comes over a new connection, `on_new` is awaited before the first event. A connection does not outlive the
        server's process, so what `on_new` finds out holds for everything that comes over it. Streams share no connection with
        anything else: one that a health check made would count as known.
        """
        with self._translated(path):
            response, done = await self._streams.post(path, _dump(body)), False
            try:
                if response.status >= 300:
                    raise self._refusal(path, response.status, await response.read_whole())
                if on_new is not None and response.new:
                    await on_new()
                rest = b""
                while data := await response.read():
                    if len(rest) > _LONG_EVENT:
                        data = await _until_its_end(response, data)
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event == b"data: [DONE]":
                            done = True
                            return
                        if event.startswith(b"data: "):
                            yield orjson.loads(event[6:])
            finally:
                response.leave(done=done)

    async def returns_ok(self, path: str, timeout_s: float) -> bool:
        """Return true if a GET is responded to with 200."""
        return await self._control.status_of(self._base_url + path, timeout_s) == 200

    async def close(self) -> None:
        """Close the connections."""
        self._streams.close()
        await self._control.close()

    def _translated(self, path: str) -> _Translated:
        return _Translated(f"engine {self._name}, {path}")

    def _refusal(self, path: str, status: int, body: bytes) -> EngineError:
        text, quoted = f"engine {self._name}, {path}: {status}", _message(body)[:500]
        if status == 503:
            return EngineUnreachable(text, quoted=quoted)
        kind = EngineRefused if status in _BLAMES_THE_REQUEST else EngineError
        return kind(text, quoted=quoted)


def _dump(body: Any) -> bytes:
    """Return a body as JSON, in which token ids may be arrays."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def failure(error: Mapping[str, Any]) -> EngineError:
    """Return the error of an event with an `error`, which an engine sends before or amid tokens."""
    quoted = str(error.get("message"))
    if error.get("code") in _BLAMES_THE_REQUEST:
        return EngineRefused("the engine refuses the request", quoted=quoted)
    return EngineError("the engine failed a generation", quoted=quoted)


def _message(body: bytes) -> str:
    """Return the message in a response, without the JSON around it."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return found if isinstance(found, str) else body.decode(errors="replace")


class _Translated:
    """Turns the HTTP library's errors into ours."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise EngineUnreachable(f"{self._where}: no response in time ({error})") from error
        if isinstance(error, ERRORS):
            raise EngineUnreachable(f"{self._where}: {error or type(error).__name__}") from error


async def _until_its_end(response: StreamConnection, data: bytes) -> bytes:
    """Return what follows in a response, `data` first, up to the piece in which an event ends."""
    parts = [data]
    while b"\n\n" not in parts[-1] and not parts[-1].startswith(b"\n"):
        if not (more := await response.read()):
            break
        parts.append(more)
    return b"".join(parts)
