"""Bodies that are too large, too deep, packed, or lie about their length: refused before anything of them is parsed."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from headgate.json_depth import MAX_DEPTH, TooDeep, check_depth
from tests.harness.waiting import within
from tests.security.tenants import ROOT, Tenants, bearer, routes

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def raw(stage: Tenants, head: str, body: bytes, *, end: bool = False) -> bytes:
    """Send bytes on a connection and return the response; with `end`, nothing more will come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.gateway.settings.server.port)
    try:
        key = f"Authorization: Bearer {stage.bob.episode_key}\r\n"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{key}{head}\r\n".encode() + body)
        if end:
            writer.write_eof()
        async with within("a response, or the end of the connection"):
            return await reader.read(65_536)
    finally:
        writer.close()


def status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


async def test_a_declared_length_over_the_limit_is_not_read(stage: Tenants) -> None:
    limit = stage.gateway.settings.server.body_limit_bytes
    response = await raw(stage, f"Content-Length: {limit + 1}\r\n", b"")
    assert status(response) == 400 and b"body_too_large" in response


async def test_chunks_over_the_limit_are_not_taken(stage: Tenants) -> None:
    """No length is declared; the connection is served while its sender still has more to send."""
    limit = stage.gateway.settings.server.body_limit_bytes
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    response = await raw(stage, "Transfer-Encoding: chunked\r\n", chunk * (limit // 2**20 + 1))
    assert status(response) == 400 and b"body_too_large" in response


async def test_lengths_that_lie_split_no_request(stage: Tenants) -> None:
    """A second request hidden in the body of the first would be served without any check."""
    hidden = f"GET /admin/v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ROOT}\r\n\r\n".encode()
    both = await raw(stage, "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + hidden)
    twice = await raw(stage, "Content-Length: 4\r\nContent-Length: 200\r\n", b"{}  " + hidden)
    words = await raw(stage, "Content-Length: four\r\n", b"{}  " + hidden)
    minus = await raw(stage, "Content-Length: -4\r\n", b"{}  " + hidden)
    for response in (both, twice, words, minus):
        assert status(response) == 400 and b"ann-policy" not in response
    short = await raw(stage, "Content-Length: 1000\r\n", b"{}", end=True)
    assert short == b"" or status(short) >= 400


async def test_packed_bodies_are_not_unpacked(stage: Tenants) -> None:
    packed = gzip.compress(json.dumps({"model": "bob-policy", "messages": []}).encode())
    for encoding in ("gzip", "deflate", "br"):
        for path, key in (("/v1/chat/completions", stage.bob.episode_key), ("/admin/v1/episodes", ROOT)):
            headers = {**bearer(key), "content-encoding": encoding}
            response = await stage.gateway.http.post(path, content=packed, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (415, "encoded_body")
            assert response.headers["accept-encoding"] == "identity"


def nested(depth: int, kind: str) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth if kind == "objects" else b"[" * depth + b"]" * depth


@pytest.mark.parametrize("kind", ["objects", "arrays"])
async def test_bodies_that_are_nested_too_deep_exhaust_nothing(stage: Tenants, kind: str) -> None:
    """On every route that takes a body, at every depth around what parsers and Python's stack bear."""
    from gateway.app import create_app

    posts = {path for method, path in routes(create_app(stage.gateway.settings)) if method == "POST"}
    paths = sorted(posts - {"/ping"})  # it takes none
    for path in paths:
        key = ROOT if path.startswith("/admin") else stage.bob.episode_key
        for depth in (MAX_DEPTH, 254, 900, 1100, 100_000):
            for body in (
                nested(depth, kind),
                b'{"model":"bob-policy","metadata":' + nested(depth, kind) + b"}",
            ):
                response = await stage.gateway.http.post(
                    path.format(**stage.unknown),
                    content=body,
                    headers={**bearer(key), "content-type": "application/json"},
                )
                assert 400 <= response.status_code < 500, (path, depth, response.text[:200])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_what_is_nested_too_deep_is_refused_as_that(stage: Tenants, path: str) -> None:
    """Before anything else is looked at: what it names is not even read."""
    for depth, code in ((MAX_DEPTH, "body_too_deep"), (900, "body_too_deep"), (100_000, "invalid_json")):
        body = b'{"model":"no-such-model","nonsense":' + nested(depth, "arrays") + b"}"
        headers = {**stage.bob.headers, "content-type": "application/json"}
        response = await stage.gateway.http.post(path, content=body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_depth_is_counted_exactly() -> None:
    value: Any = {}
    for _ in range(MAX_DEPTH - 1):
        value = (
            {"a": [1, "x"], "b": value}
            if isinstance(value, dict) and len(value) % 2
            else {"b": value, "c": 1}
        )
    check_depth(value)
    with pytest.raises(TooDeep, match="nested"):
        check_depth([value])
