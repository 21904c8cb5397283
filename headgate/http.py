"""HTTP between headgate's own programs: gateway processes, engines, servers of weights.

Owns the limits of connections: any number, a deadline to connect, and idle ones are closed before the server closes them. Nothing
is redirected, compressed, or kept as a cookie. The public client of a gateway is `headgate.client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Final, Self

import aiohttp

KEEP_ALIVE_S = 4.0
"""uvicorn, and so vLLM and SGLang, closes idle connections after 5 s by default."""
ERRORS: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""The errors of a request without a response."""


class Session:
    """Connections, opened by the first request because they belong to the event loop that runs then."""

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        connect_s: float = 10.0,
        total_s: float | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        """`total_s`: the time for a request and its response, unless the request has a `timeout` of its own."""
        self._headers = headers
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s)
        self._keep_alive_s = keep_alive_s
        self._opened: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def request(
        self, method: str, url: Any, **options: Any
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return a request, which `async with` sends. It raises `ERRORS`."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_alive_s),
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._opened.request(method, url, allow_redirects=False, **options)

    async def status_of(self, url: str, timeout_s: float = 5.0) -> int | None:
        """Return the status of a GET, or None without a response."""
        try:
            async with self.request("GET", url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                return response.status
        except ERRORS:
            return None

    async def close(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()


def headers_with(key: str | None) -> dict[str, str]:
    """Return the headers of requests with a key, for responses that are not compressed."""
    return {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}


async def responds(url: str, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> bool:
    """Return True if a GET over a new connection is responded to with 200."""
    async with Session(headers) as session:
        return await session.status_of(url, timeout_s) == HTTPStatus.OK
