"""The admin API: on a key, on a port of its own, and never open to every client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.api.middleware.episode_prefix import split
from gateway.api.middleware.port_guard import PortGuard
from gateway.app import create_app
from gateway.config.settings import ConfigError, Settings
from gateway.server import listening
from headgate.processes.ports import free_port
from tests.harness.gateways import settings_for
from tests.harness.waiting import LONG_S, until

KEY = "the-root-key-of-everything"
CLUSTER = "the-key-of-the-cluster"


async def test_the_admin_api_is_at_its_own_port_alone(tiny_model: Path, tmp_path: Path) -> None:
    import uvicorn

    values = settings_for(tiny_model, tmp_path, admin={"key": KEY, "port": free_port()})
    settings = Settings.parse(values)
    app, sockets = create_app(settings), listening(settings, False)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets))
    await until(lambda: server.started or serving.done(), "the server listens")
    assert server.started
    public, private = (f"http://127.0.0.1:{port}" for port in (settings.server.port, settings.admin.port))
    try:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=LONG_S) as http:

            async def status(base: str, path: str, **more: Any) -> int:
                return (await http.get(base + path, **more)).status_code

            for path in (
                "/admin/v1/status",
                "/admin/v1/nothing",
                "/admin",
                "/metrics",
                "/console",
                "/console/",
                "/e/x/admin/v1/status",
            ):
                response = await http.get(public + path)
                nothing = "/nothing/" if path.endswith("/") else "/nothing"
                missing = await http.get(public + nothing)
                assert (response.status_code, response.text.replace(path, "P")) == (
                    404,
                    missing.text.replace(nothing, "P"),
                )
            spoofed = {
                "host": f"127.0.0.1:{settings.admin.port}",
                "x-forwarded-port": str(settings.admin.port),
            }
            assert await status(public, "/admin/v1/status", headers=spoofed) == 404
            assert await status(public, "/v1/models") == 200
            assert await status(private, "/admin/v1/status") == 200
            assert await status(private, "/metrics") == 200
            for path in ("/v1/models", "/e/x/v1/models", "/docs", "/openapi.json", "/peers/v1/link", "/"):
                assert await status(private, path) == 404, path
            for base in (public, private):
                assert await status(base, "/healthz") == await status(base, "/readyz") == 200
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    ("path", "port", "mark", "passes"),
    [
        ("/admin/v1/status", 1, b"", False),
        ("/admin/v1/status", 2, b"", True),
        ("/admin/v1/status", 1, CLUSTER.encode(), True),
        ("/admin/v1/status", 1, b"another key", False),
        ("/v1/models", 2, CLUSTER.encode(), False),
        ("/administrator", 1, b"", True),
        ("/e/ep-1/admin/v1/status", 1, b"", False),
    ],
)
async def test_other_processes_of_the_cluster_come_in_by_its_key(
    tiny_model: Path, tmp_path: Path, path: str, port: int, mark: bytes, passes: bool
) -> None:
    cluster = {"key": CLUSTER}
    settings = Settings.parse(
        settings_for(tiny_model, tmp_path, admin={"key": KEY, "port": 2}, cluster=cluster)
    )
    passed: list[str] = []
    sent: list[Any] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-headgate-forwarded", mark)] if mark else []
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "server": ("127.0.0.1", port)}
    await PortGuard(inside, settings)(scope, None, send)  # type: ignore[arg-type]
    assert bool(passed) == passes
    assert passes or sent[0]["status"] == 404


def test_a_prefix_hides_no_path() -> None:
    assert split("/e/ep-1/admin/v1") == ("ep-1", "/admin/v1")
    assert split("/e//admin") == (None, "/e//admin")
    assert split("/v1/models") == (None, "/v1/models")


@pytest.mark.parametrize(
    "more",
    [
        {"server": {"host": "0.0.0.0"}},
        {"server": {"host": "::"}},
        {"server": {"host": "gateway.internal"}},
        {"admin": {"port": 9, "host": "0.0.0.0"}},
        {"server": {"host": "192.168.0.4"}, "admin": {"port": 9, "host": "127.0.0.1"}},
    ],
)
def test_without_a_key_nothing_is_served_beyond_loopback(
    tiny_model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"\[admin\] key is needed"):
        Settings.parse(settings_for(tiny_model, tmp_path, **more))
    admin = {**more.get("admin", {}), "key": KEY}
    Settings.parse(settings_for(tiny_model, tmp_path, **{**more, "admin": admin}))


def test_a_port_of_its_own_is_another_port(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(tiny_model, tmp_path)
    with pytest.raises(ConfigError, match=r"must differ from \[server\] port"):
        Settings.parse({**values, "admin": {"port": values["server"]["port"]}})
    with pytest.raises(ConfigError, match="`host` needs `port`"):
        Settings.parse({**values, "admin": {"host": "127.0.0.1"}})
