"""Sends a request to another gateway process and relays its response.

Requests of all callers share connections, so both sides must agree on where each message ends. Invariants: a request is sent with
its whole body, whose length the client library states; headers about one connection are not copied to another (RFC 9110, 7.6.1);
a connection is not used again if its request was not written or its response not read to the end.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import aiohttp
from starlette.types import Scope, Send
from yarl import URL

from gateway.api.errors import NOT_BEGUN
from headgate.errors import Unavailable
from headgate.http import Session
from headgate.keys import Keyring

FORWARDED = b"x-headgate-forwarded"
"""The header with the cluster's key, by which a process knows requests that another process has sent on."""
_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Hop-by-hop headers: they belong to one connection, in requests and in responses."""
_REQUEST = _CONNECTION | {b"content-length", b"expect", b"host", FORWARDED}
"""Headers of a request that are not forwarded: those of the connection, those that the client library or this process writes, and
`Expect`, because this process has already requested the body.
"""
_KEYS = frozenset({b"authorization", b"x-api-key"})
"""Headers that are sent on even where `Connection` names them: the key that was checked here is the one that goes on."""
_LIBRARY = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add where the client has sent none."""

Headers = Sequence[tuple[bytes, bytes]]


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the end-to-end headers: without `dropped`, and without those that `Connection` names, except keys."""
    named = {
        token.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for token in value.split(b",")
    }
    return [(name.lower(), value) for name, value in headers if name.lower() not in dropped | (named - _KEYS)]


def was_forwarded(scope: Scope, cluster: Keyring[bool]) -> bool:
    """Return whether another process of the cluster has sent a request on; `cluster` has the cluster's key."""
    given = next((value for name, value in scope["headers"] if name == FORWARDED), b"")
    return cluster.find(given) is not None


class Hop:
    """The connections to other gateway processes."""

    def __init__(self, key: str) -> None:
        """`key`: the cluster's, by which the other process knows that the request was sent on."""
        self._key = key
        # Gateways keep idle connections for 75 s.
        self._session = Session(connect_s=5.0, keep_alive_s=60.0)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def send(self, url: str, scope: Scope, body: bytes, send: Send) -> bool:
        """Send a request to the process at `url`, and its response to the client. Return False if that process did not
        begin it.

        Raise Unavailable if it is not known whether the request was begun, and aiohttp.ClientError if the response
        breaks off.
        """
        headers = [
            (n.decode("latin-1"), v.decode("latin-1")) for n, v in end_to_end(scope["headers"], _REQUEST)
        ]
        request = self._session.request(
            scope["method"],
            URL(url + _target(scope), encoded=True),
            headers=[*headers, (FORWARDED.decode(), self._key)],
            data=io.BytesIO(body) if body else None,
            skip_auto_headers=_LIBRARY,
        )
        begun = False
        try:
            async with request as response:
                if NOT_BEGUN in response.headers:
                    return False
                begun = True
                await _relay(response, send)
        except aiohttp.ClientConnectorError:
            return False
        except aiohttp.ClientError as error:
            if begun:
                raise  # break the client's connection too: that is what happened upstream
            message = "the process that handled the request died; it is not known whether it carried out the request"
            raise Unavailable(message, retry_after=1.0, code="coordinator_lost") from error
        return True


def _target(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return raw.decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")


async def _relay(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = end_to_end(response.raw_headers, _CONNECTION)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    async for part in response.content.iter_any():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
