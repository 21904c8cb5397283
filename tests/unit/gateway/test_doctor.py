"""Findings of `gateway doctor` on a machine: each fault is made, and its finding has the fix."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import gateway.telemetry
from gateway.config.settings import Settings
from gateway.doctor import Finding, checks, engines, machine
from gateway.store import clock
from gateway.store.holder import locked
from headgate.extras import install_command
from headgate.processes.ports import free_port
from tests.harness.collector import Collector
from tests.harness.gateways import serve, settings_for
from tests.harness.models import save_model
from tests.harness.stores import make_tables

Usage = namedtuple("Usage", "total used free")


def settings(model: Path, work: Path, **sections: Any) -> Settings:
    return Settings.parse(settings_for(model, work, **sections))


def only(found: list[Finding], level: str) -> Finding:
    """Return the one finding of a level; it has a fix."""
    [finding] = [one for one in found if one.level == level]
    assert finding.fix
    return finding


def interpreter(work: Path, script: str) -> str:
    """Return a program in the place of an engine's Python."""
    path = work / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_full_disk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: Usage(2**40, 2**40 - 2**30, 2**30))
    warning = only(await machine.examine_disk(settings(tiny_model, tmp_path)), "warning")
    assert "[store] url: 1.0 GiB are free" in warning.what


@pytest.mark.parametrize("folder", ["file/below", "locked"])
async def test_a_store_that_cannot_be_made(
    tiny_model: Path, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir()
    tried = machine.writable
    locked = tmp_path / "locked"  # its rights do not hold for root
    monkeypatch.setattr(machine, "writable", lambda place, **kind: place != locked and tried(place, **kind))
    given = settings(tiny_model, tmp_path, store={"url": f"sqlite:///{tmp_path / folder}/store.db"})
    problem = only(await machine.examine_database(given), "problem")
    assert "none can be made" in problem.what


async def test_a_store_that_can_be_made(tiny_model: Path, tmp_path: Path) -> None:
    given = settings(tiny_model, tmp_path, store={"url": f"sqlite:///{tmp_path}/a/b/store.db"})
    (found,) = await machine.examine_database(given)
    assert (found.level, (tmp_path / "a").exists()) == ("ok", False)


async def test_a_store_that_another_gateway_has_unless_it_is_the_one_at_the_address(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_for(tiny_model, tmp_path, server={"port": free_port()})
    make_tables(values["store"]["url"])
    given = Settings.parse(values)
    assert [one.level for one in await machine.examine_database(given)] == ["ok"]
    with locked(given.store.url):
        problem = only(await machine.examine_database(given), "problem")
        assert f"gateway.db is used by the process {os.getpid()}" in problem.what

        async def responses(_host: str, _port: int) -> bool:
            return True

        monkeypatch.setattr(machine, "gateway_responds", responses)
        _, finding = await machine.examine_database(given)
        assert (finding.level, str(os.getpid()) in finding.what) == ("ok", True)


async def test_an_address_that_another_program_has(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    given = settings(tiny_model, tmp_path, server={"port": port})
    (found,) = await machine.examine_address(given)
    assert (found.level, f"127.0.0.1:{port} is free" in found.what) == ("ok", True)
    with socket.create_server(("127.0.0.1", port)) as other:
        responding = asyncio.create_task(asyncio.to_thread(lambda: other.accept()[0].close()))
        assert "taken by another program" in only(await machine.examine_address(given), "problem").what
        await responding


async def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    problem = only(await engines.examine_models(settings(tmp_path / "none", tmp_path)), "problem")
    assert "no such folder" in problem.what
    assert f"hf download ORGANIZATION/MODEL --local-dir {tmp_path / 'none'}" in problem.what


async def test_an_error_of_one_part_ends_no_other(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Settings) -> list[Finding]:
        raise KeyError("odd")

    async def well(_: Settings) -> list[Finding]:
        return [Finding("ok", "well")]

    monkeypatch.setattr(checks, "CHECKS", {"first": broken, "second": well})
    found = {part: ones async for part, ones in checks.examine(settings(tiny_model, tmp_path))}
    assert "KeyError: 'odd'" in only(found["first"], "problem").what
    assert found["second"] == [Finding("ok", "well")]


async def test_few_open_files_and_few_processes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_NPROC: (512, 512)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    files, processes = await machine.examine_limits(settings(tiny_model, tmp_path))
    assert (files.level, files.fix) == ("warning", "ulimit -n 65536 before the start")
    assert (processes.level, processes.fix) == ("warning", "ulimit -u unlimited before the start")


async def test_a_clock_that_differs_from_the_databases(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tiny_model, tmp_path)
    make_tables(given.store.url)
    monkeypatch.setattr(clock, "now", lambda _connection: time.time() + 90)
    warning = only(await machine.examine_database(given), "warning")
    assert "clock is +90" in warning.what
    assert "NTP" in warning.fix


@pytest.mark.parametrize(
    ("script", "level", "words"),
    [
        ("exit 1", "problem", "has no vLLM"),
        ("echo 0.12.0", "warning", "vllm 0.12.0, which headgate was not tested with"),
        ("echo 0.32.1", "ok", "vllm 0.32.1"),
    ],
)
async def test_the_vllm_of_engines_that_are_to_be_started(
    tiny_model: Path, tmp_path: Path, script: str, level: str, words: str
) -> None:
    engine = {"launch": "vllm", "python": interpreter(tmp_path, script)}
    [finding] = await engines.examine_engines(settings(tiny_model, tmp_path, engine=engine))
    assert (finding.level, words in finding.what) == (level, True), finding


async def test_tied_weights_on_the_cpu_build(tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=1, tied=True)
    engine = {"launch": "vllm", "python": interpreter(tmp_path, "echo cpu")}
    found = await engines.examine_models(settings(tmp_path / "model", tmp_path, engine=engine))
    warning = only([one for one in found if "tie" in one.what], "warning")
    assert "each update restarts its engines" in warning.what


async def test_a_collector_of_spans_that_is_there_or_not(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    there = {"endpoint": f"http://127.0.0.1:{port}"}
    given = settings(tiny_model, tmp_path, telemetry=there)
    async with serve(Collector().app(), port):
        [finding] = await machine.examine_collector(given)
        assert finding.level == "ok"
    warning = only(await machine.examine_collector(given), "warning")
    assert "accepts no spans" in warning.what


async def test_a_collector_without_the_sdk(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gateway.telemetry.otel", None)
    monkeypatch.delattr(gateway.telemetry, "otel", raising=False)
    given = settings(tiny_model, tmp_path, telemetry={"endpoint": "http://127.0.0.1:4318"})
    problem = only(await machine.examine_collector(given), "problem")
    assert install_command("otel") in problem.what
