"""Without an admin key, no web page of another site uses the gateway through a browser on its machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import ClientSession

from gateway.api.middleware.web_guard import WebGuard
from gateway.app import create_app
from gateway.archive import RecordedRun, create_archive
from gateway.config.settings import Settings
from headgate.web_pages import OwnNames
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.mirrors import serving
from tests.harness.waiting import within
from tests.security.tenants import routes

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = "the-root-key-of-everything"
SIMPLE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
"""What a browser sends with a POST that needs no preflight."""
OWN = OwnNames.of(["127.0.0.1"], ["https://headgate.example/base", "http://host.docker.internal:8000"], "-")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    async with run_gateway(settings_for(tiny_model, tmp_path_factory.mktemp("pages"))) as running:
        yield running


async def test_a_page_whose_name_points_here_reaches_no_route(gateway: RunningGateway) -> None:
    """DNS rebinding: to the browser the gateway is the page's own origin."""
    every = {route for route in routes(create_app(gateway.settings)) if route[0] != "WS"}
    for method, path in sorted({*every, ("GET", "/console/"), ("GET", "/e/ep-1/admin/v1/status")}):
        rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
        response = await gateway.http.request(method, path, headers=rebound)
        kind = response.json()["error"]
        assert response.status_code == 403, (method, path)
        assert kind.get("code", "foreign_host") == "foreign_host" and "[admin] key" in kind["message"]


async def test_a_simple_post_of_another_site_changes_nothing(gateway: RunningGateway) -> None:
    for route in ("pause", "resume"):
        path = f"/admin/v1/engines/{gateway.slot.name}/{route}"
        response = await gateway.http.post(path, headers=SIMPLE)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_origin")
    assert gateway.slot.state == "open"
    image = await gateway.http.get("/admin/v1/status", headers={"sec-fetch-site": "cross-site"})
    assert image.status_code == 403
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await gateway.http.get("/console/", headers=linked)).status_code != 403
    assert (await gateway.http.post("/console/", headers=linked)).status_code == 403


async def test_the_console_and_programs_use_it_as_before(gateway: RunningGateway) -> None:
    port = gateway.settings.server.port
    for name in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:9", "LOCALHOST", "headgate.localhost:9"):
        page = {"host": name, "origin": f"http://{name}", "sec-fetch-site": "same-origin"}
        assert (await gateway.http.get("/admin/v1/status", headers=page)).status_code == 200, name


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"host": "headgate.example"}, True),
        ({"host": "host.docker.internal:8000"}, True),
        ({"host": "127.0.0.1:8000", "origin": "https://headgate.example"}, True),
        ({"host": "localhost.:8000"}, True),
        ({"host": "[::ffff:127.0.0.1]:8000"}, True),
        ({"host": "0.0.0.0:8000"}, True),
        ({}, True),
        ({"host": "localhost", "origin": "http://localhost:80"}, True),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost:8000", "origin": "null"}, False),
        ({"host": "localhost:8000", "origin": "http://headgate.example:8080"}, False),
        ({"host": ""}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "127.0.0.1.nip.io"}, False),
        ({"host": "evil.example@localhost"}, False),
        ({"host": "localhost:8000@evil.example"}, False),
        ({"host": "192.168.0.4:8000"}, False),
        ({"host": "[fe80::1]"}, False),
        ({"host": "localhost:8000", "sec-fetch-site": "Cross-Site"}, False),
    ],
)
async def test_names_are_the_loopbacks_and_the_servers_own(headers: dict[str, str], passes: bool) -> None:
    assert await passed(headers) == passes


async def test_a_second_host_hides_no_first() -> None:
    assert not await passed({"host": "localhost"}, first=[(b"host", b"evil.example")])


async def test_what_another_process_forwards_was_checked_there() -> None:
    page = {"host": "10.0.0.7:8000", "origin": "http://localhost:8000", "x-headgate-forwarded": "the-key"}
    assert await passed(page, cluster_key="the-key")
    assert not await passed({**page, "x-headgate-forwarded": "another"}, cluster_key="the-key")
    assert not await passed(page)


async def passed(headers: dict[str, str], cluster_key: str | None = None, first: Any = ()) -> bool:
    """Whether the guard lets a request in."""
    seen: list[str] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    async def send(_message: Any) -> None:
        pass

    given = [*first] + [(name.encode(), value.encode()) for name, value in headers.items()]
    scope_of_request = {"type": "http", "method": "GET", "path": "/admin/v1/status", "headers": given}
    await WebGuard(inside, OWN, cluster_key)(scope_of_request, None, send)  # type: ignore[arg-type]
    return bool(seen)


async def test_with_a_key_any_name_is_right(tiny_model: Path, tmp_path: Path) -> None:
    """Agents in containers, and clients behind proxies, use names that the gateway does not know."""
    async with run_gateway(settings_for(tiny_model, tmp_path, admin={"key": ROOT})) as gateway:
        headers = {"host": "host.docker.internal:8000", "authorization": f"Bearer {ROOT}"}
        assert (await gateway.http.get("/admin/v1/status", headers=headers)).status_code == 200
        assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200


async def test_the_public_url_is_the_servers_own(tiny_model: Path, tmp_path: Path) -> None:
    server = {"public_url": "http://host.docker.internal:8000"}
    app = create_app(Settings.parse(settings_for(tiny_model, tmp_path, server=server)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=server["public_url"]) as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/healthz", headers={"host": "gateway.lan"})).status_code == 403


async def test_recorded_runs_and_mirrors_without_a_key_are_checked_too(tmp_path: Path) -> None:
    app = create_archive(RecordedRun("sqlite:///none", ()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://evil.example") as http:
        assert (await http.get("/admin/v1/episodes")).status_code == 403
    async with ClientSession() as http, serving(tmp_path) as url:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with http.post(f"{url}/versions/1", headers=headers, json={"sources": []}) as response:
                assert response.status == 403
        async with http.get(f"{url}/versions") as response:
            assert response.status == 200
        port = int(url.rpartition(":")[2])
        for line, hosts in (("http://evil.example/versions", "Host: localhost"), ("/versions", "Host:")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {line} HTTP/1.1\r\n{hosts}\r\nConnection: close\r\n\r\n".encode())
            async with within("the end of the connection"):
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
