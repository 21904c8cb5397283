"""Findings of `gateway doctor` on a machine: each fault is made, and its finding says how to mend it."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import gateway.telemetry
from gateway.doctor import engines, host, models, stores, telemetry
from gateway.doctor.finding import Finding
from gateway.settings import Settings
from gateway.store import clock
from processes.ports import free_port
from tests.harness.collector import Collector
from tests.harness.gateways import serve, settings_for
from tests.harness.models import save_model
from tests.harness.stores import make_tables

Usage = namedtuple("Usage", "total used free")


def settings(model: Path, work: Path, **sections: Any) -> Settings:
    return Settings.parse(settings_for(model, work, **sections))


def only(found: list[Finding], level: str) -> Finding:
    """The one finding of a level; it says how to mend it."""
    [finding] = [one for one in found if one.level == level]
    assert finding.mend
    return finding


def interpreter(work: Path, script: str) -> str:
    """A program in the place of an engine's Python."""
    path = work / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_full_disk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: Usage(2**40, 2**40 - 2**30, 2**30))
    warning = only(await host.examine_disk(settings(tiny_model, tmp_path)), "warning")
    assert "[store] url: 1.0 GiB are free" in warning.what


async def test_few_open_files_and_few_processes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 4096), resource.RLIMIT_NPROC: (512, 512)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    files, processes = await host.examine_limits(settings(tiny_model, tmp_path))
    assert (files.level, files.mend) == ("warning", "ulimit -n 65536 before the start")
    assert (processes.level, processes.mend) == ("warning", "ulimit -u unlimited before the start")


async def test_a_clock_that_differs_from_the_databases(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tiny_model, tmp_path)
    make_tables(given.store.url)
    monkeypatch.setattr(clock, "now", lambda _connection: time.time() + 90)
    warning = only(await stores.examine_database(given), "warning")
    assert "clock is +90" in warning.what
    assert "NTP" in warning.mend


@pytest.mark.parametrize(
    ("script", "level", "said"),
    [
        ("exit 1", "problem", "has no vLLM"),
        ("echo 0.12.0", "warning", "vllm 0.12.0, which headgate was not tested with"),
        ("echo 0.32.1", "ok", "vllm 0.32.1"),
    ],
)
async def test_the_vllm_of_engines_that_are_to_be_started(
    tiny_model: Path, tmp_path: Path, script: str, level: str, said: str
) -> None:
    engine = {"launch": "vllm", "python": interpreter(tmp_path, script)}
    [finding] = await engines.examine(settings(tiny_model, tmp_path, engine=engine))
    assert (finding.level, said in finding.what) == (level, True), finding


async def test_tied_weights_on_the_cpu_build(tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=1, tied=True)
    engine = {"launch": "vllm", "python": interpreter(tmp_path, "echo cpu")}
    found = await models.examine(settings(tmp_path / "model", tmp_path, engine=engine))
    warning = only([one for one in found if "tie" in one.what], "warning")
    assert "each update restarts its engines" in warning.what


async def test_a_collector_of_spans_that_is_there_or_not(tiny_model: Path, tmp_path: Path) -> None:
    port = free_port()
    there = {"endpoint": f"http://127.0.0.1:{port}", "timeout_s": 60.0}
    given = settings(tiny_model, tmp_path, telemetry=there)
    async with serve(Collector().app(), port):
        [finding] = await telemetry.examine(given)
        assert finding.level == "ok"
    away = settings(tiny_model, tmp_path, telemetry={**there, "timeout_s": 0.5})
    warning = only(await telemetry.examine(away), "warning")
    assert "takes no spans within 0.5 s" in warning.what


async def test_a_collector_without_the_sdk(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gateway.telemetry.otel", None)
    monkeypatch.delattr(gateway.telemetry, "otel", raising=False)
    given = settings(tiny_model, tmp_path, telemetry={"endpoint": "http://127.0.0.1:4318"})
    problem = only(await telemetry.examine(given), "problem")
    assert "headgate[otel]" in problem.what
