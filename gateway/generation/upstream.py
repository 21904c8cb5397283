"""Relays requests to a model behind another OpenAI-compatible API, and records the exchange.

The address and the key come only from the administrator's configuration, never from a request. Upstream replies are not trained:
they have no reliable tokens and log-probabilities. What was received is recorded even if the client disconnects, the upstream
fails, or the episode ends in the meantime.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from gateway.config import UpstreamSettings
from gateway.generation.upstream_call import UpstreamCall
from gateway.render.offload import offload
from gateway.render.redaction import Redactor
from gateway.store import turns
from gateway.store.database import Database
from gateway.store.records import CallRecord
from headgate.errors import GatewayError, UpstreamFailed, UpstreamTimedOut

log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_NOT_STORED = "[not stored under [redaction]: a stream, or not JSON]"
_LIMITS = httpx.Limits(max_connections=0, keepalive_expiry=4.0)
"""0 means no limit; None would be aiohttp's default of 100."""


class Upstream:
    """One upstream model."""

    def __init__(
        self,
        name: str,
        settings: UpstreamSettings,
        database: Database,
        keep_alive_s: float,
        redactor: Redactor | None = None,
    ) -> None:
        self._redactor = redactor or Redactor()
        self.name = name
        self.keep_alive_s = keep_alive_s
        self._settings = settings
        self._database = database
        self._running: set[UpstreamCall] = set()
        # Relayed responses must not be compressed: their events could not be separated and sent one by one.
        self._key = settings.key.get_secret_value() if settings.key is not None else ""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if settings.key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        self._http = httpx.AsyncClient(
            base_url=settings.url.rstrip("/") + "/",
            timeout=httpx.Timeout(
                settings.timeout_s,
                connect=_CONNECT_S,
                pool=max(settings.timeout_s, _CONNECT_S),  # aiohttp's limit for a connection as a whole
            ),
            headers=headers,
            transport=AiohttpTransport(limits=_LIMITS),
        )

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def end(self, reason: GatewayError) -> None:
        """End every running call; their clients get the reason."""
        for call in list(self._running):
            await call.stop(reason)

    @asynccontextmanager
    async def request(self, call: UpstreamCall) -> AsyncIterator[httpx.Response]:
        """Yield the head of the upstream's response; `read` has the rest. Raise UpstreamFailed if it does not come."""
        content = orjson.dumps({**call.request, "model": self._settings.model or self.name})
        request = self._http.build_request("POST", call.api, content=content)
        self._running.add(call)
        try:
            with self._translated(call, f"send the request to the upstream of {self.name}"):
                async with call.until_stopped():
                    response = await self._http.send(request, stream=True)
            call.begin(response.status_code)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            self._running.discard(call)

    async def read(self, call: UpstreamCall, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the response's parts as they come. Raise UpstreamFailed if it breaks off."""
        parts = response.aiter_bytes()
        while True:
            with self._translated(call, f"read the response of the upstream of {self.name}"):
                async with call.until_stopped():
                    part = await anext(parts, None)
            if part is None:
                break
            call.append(part)
            yield part

    def hidden(self, body: bytes) -> bytes:
        """Remove the key from the upstream's text: some APIs quote a key that they refuse."""
        return body.replace(self._key.encode(), b"***") if self._key else body

    def broken(self, call: UpstreamCall) -> UpstreamFailed:
        """Return the error for a stream that ended early without an error event."""
        call.finish("error")
        return UpstreamFailed(
            f"the upstream of {self.name!r} ended its response in the middle", code="upstream_broke_off"
        )

    async def record(self, call: UpstreamCall) -> None:
        """Commit the request and its response, once."""
        if not call.claim_record():
            return
        now = time.time()
        content = self.hidden(b"".join(call.parts))
        request, response = await offload(
            (call.request, content), lambda: _redacted(self._redactor, call.request, content)
        )
        row: CallRecord = {
            "id": call.call_id,
            "episode_id": call.episode_id,
            "model": self.name,
            "node": -1,
            "request_key": "",
            "api": call.api,
            "stream": bool(call.request.get("stream")),
            "requested": {k: v for k, v in request.items() if k not in ("messages", "tools")},
            "used": {},
            "logprobs_mode": "",
            "engine": "upstream",
            "finish_reason": call.finish_reason,
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "pauses": 0,
            "digest": b"",
            "tool_faults": None,
            "queued_s": None,
            "received_at": call.received_at,
            "first_token_s": call.first_part_at and call.first_part_at - call.received_at,
            "seconds": now - call.received_at,
        }
        exchange = {
            "call_id": call.call_id,
            "request": request,
            "status": call.status,
            "response": response,
        }
        await self._database.submit(lambda c: turns.insert_exchange(c, row, exchange))

    @contextmanager
    def _translated(self, call: UpstreamCall, step: str) -> Iterator[None]:
        """Translate the HTTP libraries' errors. They report every failed connection as a ConnectTimeout, refused or not."""
        try:
            yield
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            call.finish("error")
            message = f"step '{step}': silent for more than {self._settings.timeout_s:g} s"
            raise UpstreamTimedOut(message, code="upstream_timeout") from error
        except (httpx.HTTPError, aiohttp.ClientError) as error:
            call.finish("error")
            log.warning("step '%s': %r", step, error)  # `error` names the address, which agents must not see
            message = f"step '{step}': there is no connection, or it broke"
            raise UpstreamFailed(message, code="upstream_unreachable") from error


def _redacted(redactor: Redactor, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], str]:
    """Return a request and its response as they may be stored. Of a stream nothing may, for secrets can be spread over its
    events."""
    text = content.decode(errors="replace")
    if not redactor.active:
        return request, text
    try:
        response = orjson.loads(content)
    except ValueError:
        return redactor.json(request), _NOT_STORED
    known = redactor.secrets(request, response)
    return redactor.json(request, known), orjson.dumps(redactor.json(response, known)).decode()
