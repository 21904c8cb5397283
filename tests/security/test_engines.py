"""Engines are where only the gateway reaches them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config import EngineSettings, ModelSettings, is_public
from gateway.config.settings import ConfigError, Settings
from gateway.engines.address import check_engines, check_place
from gateway.engines.process import _COMMANDS
from headgate.errors import BadRequest
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.waiting import LONG_S

PUBLIC = ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8"]
LINK_LOCAL = ["169.254.169.254", "::ffff:169.254.169.254", "fe80::1", "fd00:ec2::254", "100.100.100.200"]
PRIVATE = ["127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.9", "100.64.0.1", "::1", "fd00::1", "vllm-0"]


def external(host: str, **more: Any) -> dict[str, Any]:
    return {"launch": "external", "url": f"http://{f'[{host}]' if ':' in host else host}:8000", **more}


@pytest.mark.parametrize("host", PUBLIC)
def test_public_addresses_are_refused_with_the_reason(tiny_model: Path, tmp_path: Path, host: str) -> None:
    assert is_public(host)
    for engine in (
        external(host),
        {"launch": "external", "urls": ["http://10.0.0.1:1", external(host)["url"]]},
    ):
        with pytest.raises(ConfigError, match="vLLM's control endpoints ignore its API key"):
            Settings.parse(settings_for(tiny_model, tmp_path, engine=engine))
        model = {"demo": {"path": str(tiny_model), "engine": engine}}
        with pytest.raises(ConfigError, match="allow_public"):
            Settings.parse(settings_for(tiny_model, tmp_path, models=model))
    Settings.parse(settings_for(tiny_model, tmp_path, engine=external(host, allow_public=True)))


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_taken(tiny_model: Path, tmp_path: Path, host: str) -> None:
    Settings.parse(settings_for(tiny_model, tmp_path, engine=external(host)))


async def test_names_of_public_addresses_are_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and where an engine is added; `2130706433` and its like are addresses, too."""

    async def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        found = {"engine.example": "8.8.4.4", "134744072": "8.8.8.8", "inside.example": "10.0.0.7"}
        if host not in found:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    for host in ("engine.example", "134744072"):
        with pytest.raises(BadRequest, match="public address"):
            await check_place(f"http://{host}:8000", allow_public=False)
        settings = Settings.parse(settings_for(tiny_model, tmp_path, engine=external(host)))
        with pytest.raises(ConfigError, match="public address"):
            await check_engines(settings)
        await check_engines(
            Settings.parse(settings_for(tiny_model, tmp_path, engine=external(host, allow_public=True)))
        )
    await check_place("http://inside.example:8000", allow_public=False)
    await check_place("http://nowhere.example:8000", allow_public=False)


async def test_an_engine_at_a_public_address_is_not_added(tiny_model: Path, tmp_path: Path) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        for host in ("8.8.8.8", "[2001:4860:4860::8888]"):
            response = await gateway.http.post("/admin/v1/engines", json={"url": f"http://{host}:8000"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "public_engine")
        assert len(gateway.model.pool.slots) == 1


@pytest.mark.parametrize("host", LINK_LOCAL)
def test_a_link_local_address_is_no_engines(tiny_model: Path, tmp_path: Path, host: str) -> None:
    """Nor a mirror's or a node's, and with every value of `allow_public`: clouds serve credentials there."""
    url, inside = external(host)["url"], "http://10.0.0.1:1"
    for engine in (external(host, allow_public=True), {**external("10.0.0.1"), "mirrors": [url]}):
        with pytest.raises(ConfigError, match="link-local"):
            Settings.parse(settings_for(tiny_model, tmp_path, engine=engine))
    values = settings_for(tiny_model, tmp_path, engine={"launch": "external", "url": inside})
    with pytest.raises(ConfigError, match="link-local"):
        Settings.parse({**values, "nodes": {"n": {"tags": ["rollout"], "urls": [url]}}})


async def test_an_engine_or_mirror_at_a_link_local_address_is_not_added(
    tiny_model: Path, tmp_path: Path
) -> None:
    """`2852039166` is 169.254.169.254, too."""
    engine = {"allow_public": True}
    async with run_gateway(settings_for(tiny_model, tmp_path, engine=engine)) as gateway:
        for host in ("169.254.169.254", "[fe80::1]", "2852039166"):
            for param in ("url", "mirror"):
                body = {"url": "http://127.0.0.1:9", param: f"http://{host}/latest"}
                error = (await gateway.http.post("/admin/v1/engines", json=body)).json()["error"]
                assert (error["code"], error["param"]) == ("link_local_engine", param)
        assert len(gateway.model.pool.slots) == 1


def test_started_engines_are_configured_to_listen_on_loopback(tiny_model: Path) -> None:
    model, settings = ModelSettings(path=tiny_model), EngineSettings(launch="vllm")
    command = _COMMANDS["vllm"](settings, model, "demo", str(tiny_model), "127.0.0.1", 9)
    assert command[command.index("--host") + 1] == "127.0.0.1" and command.count("--host") == 1


async def test_a_started_engine_listens_on_loopback(tiny_model: Path, tmp_path: Path) -> None:
    """The kernel shows the port bound to 127.0.0.1 alone."""
    values = settings_for(tiny_model, tmp_path)
    async with run_gateway(values, in_process=False) as gateway:
        async with httpx.AsyncClient(timeout=LONG_S) as http:
            assert (await http.get(f"{gateway.slot.url}/health")).status_code == 200
        assert bound(int(gateway.slot.url.rpartition(":")[2])) == {"0100007F"}


def bound(port: int) -> set[str]:
    """The addresses (hexadecimal, as the kernel has them) at which a process listens at a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, _, at = line.split()[1].partition(":")
            if int(at, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


@pytest.mark.parametrize(
    "url",
    ["http://\U00090890\U0005f153\U000524a6\x8b\xa4\U000a04f1`k", "http://[", "http://" + "a" * 70 + ".b"],
)
async def test_an_impossible_host_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="url"):
        await check_place(url, allow_public=False)
