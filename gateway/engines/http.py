"""HTTP as engines speak it: JSON in, JSON or server-sent events out, and every failure as one of the gateway's errors.

Owns one engine's connections. A status that blames the request is EngineRefused; 503, and whatever breaks the connection, is
EngineUnreachable; any other failure EngineError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from gateway.errors import EngineError, EngineRefused, EngineUnreachable

# vLLM and SGLang close idle connections after 5 s by default: leave before they do.
# 0 is no limit to aiohttp; None would be its default of 100, and others would wait behind long streams.
_LIMITS = httpx.Limits(max_connections=0, max_keepalive_connections=None, keepalive_expiry=4.0)
_CONNECT_S = 30.0
"""An engine that is gone refuses at once, and a silent host is noticed by its health checks: this is for busy machines."""
_CONTROL_S = 600.0
"""The longest that a call that is no generation may take; loading weights is the longest of them."""
_BLAMES_THE_REQUEST = {400, 413, 422}
_JSON = {"content-type": "application/json"}


class EngineHTTP:
    """The connections to one engine. A stream of events may be silent for `silence_s`."""

    def __init__(self, name: str, base_url: str, silence_s: float) -> None:
        self._name = name
        self._silence = httpx.Timeout(silence_s, connect=_CONNECT_S, pool=_CONNECT_S)
        self._client = httpx.AsyncClient(
            base_url=base_url,
            timeout=httpx.Timeout(_CONTROL_S, connect=_CONNECT_S, pool=_CONNECT_S),
            limits=_LIMITS,
            transport=AiohttpTransport(limits=_LIMITS),
        )

    async def post(self, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> bytes:
        """Posts a JSON object; answers the body."""
        content = None if body is None else orjson.dumps(body)
        with self._translated(path):
            response = await self._client.post(path, params=params, content=content, headers=_JSON)
            if response.is_error:
                raise self._refusal(path, response.status_code, response.content)
            return response.content

    async def events(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Posts a JSON object; yields the events of the answer, until `[DONE]`."""
        with self._translated(path):
            async with self._client.stream(
                "POST", path, content=orjson.dumps(body), headers=_JSON, timeout=self._silence
            ) as response:
                if response.is_error:
                    raise self._refusal(path, response.status_code, await response.aread())
                rest = b""
                async for data in response.aiter_raw():
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event == b"data: [DONE]":
                            return
                        if event.startswith(b"data: "):
                            yield orjson.loads(event[6:])

    async def well(self, path: str, timeout_s: float) -> bool:
        """Whether a GET is answered with 200."""
        try:
            return (await self._client.get(path, timeout=timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    def _translated(self, path: str) -> _Translated:
        return _Translated(f"engine {self._name}, {path}")

    def _refusal(self, path: str, status: int, body: bytes) -> EngineError:
        text = f"engine {self._name}, {path}: {status} {body[:500].decode(errors='replace')}"
        if status == 503:
            return EngineUnreachable(text)
        return EngineRefused(text) if status in _BLAMES_THE_REQUEST else EngineError(text)


def failure(error: Mapping[str, Any]) -> EngineError:
    """What an event with an `error` means, which comes instead of tokens or in the middle of them."""
    kind = EngineRefused if error.get("code") in _BLAMES_THE_REQUEST else EngineError
    return kind(f"the engine failed a generation: {error.get('message')}")


class _Translated:
    """Turns the HTTP library's errors into ours."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, httpx.TimeoutException):
            raise EngineUnreachable(f"{self._where}: no answer in time ({error})") from error
        if isinstance(error, httpx.HTTPError):
            raise EngineUnreachable(f"{self._where}: {error or type(error).__name__}") from error
