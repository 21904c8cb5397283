"""The supervisor with children that do nothing: when it starts them again, kills them, and gives up."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway import workers
from gateway.config.settings import ConfigError, Settings
from gateway.workers import SupervisedEngine, Supervisor, Worker, check
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.waiting import until, within

SLEEP = "import time; time.sleep(3600)"


class Stub(Worker):
    """Run a line of Python; `well` returns its health."""

    def __init__(self, name: str, line: str, well: Callable[[], bool] = lambda: True) -> None:
        super().__init__(name, [], {})
        self.line = line
        self.well = well
        self.started: asyncio.Queue[LocalProcess] = asyncio.Queue()

    async def start(self) -> LocalProcess:
        self.port = free_port()
        process = await LocalProcess.start(self.name, [sys.executable, "-c", self.line], None)
        self.started.put_nowait(process)
        return process

    async def healthy(self) -> bool:
        return self.well()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.parse(
        {
            "server": {"port": free_port()},
            "models": {"m": {"path": str(tmp_path)}},
            "engine": {"launch": "fake", "count": 0},
            "store": {"url": "postgresql://nobody@127.0.0.1/none"},
        }
    )


def supervisor(settings: Settings, *stubs: Stub, targets: Path | None = None) -> Supervisor:
    made = Supervisor(settings, Path("none.toml"), len(stubs), targets=targets)
    made._workers[:] = stubs
    return made


async def stopped(made: Supervisor, running: asyncio.Task[int]) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    return await running


async def test_a_child_that_is_killed_is_started_again_and_its_port_is_published(
    settings: Settings, tmp_path: Path
) -> None:
    first, second = Stub("worker-1", SLEEP), Stub("worker-2", SLEEP)
    targets = tmp_path / "targets.json"
    made = supervisor(settings, first, second, targets=targets)
    running = asyncio.create_task(made.run())
    before = await first.started.get()
    other = await second.started.get()
    before.kill()
    after = await first.started.get()
    assert after.pid != before.pid
    assert await stopped(made, running) == 0
    assert after.returncode == -signal.SIGTERM
    assert other.returncode == -signal.SIGTERM
    found = {target["labels"]["worker"]: target["targets"] for target in json.loads(targets.read_text())}
    assert found == {w.name: [f"127.0.0.1:{w.port}"] for w in (first, second)}


async def test_a_worker_that_fails_before_any_was_up_ends_everything(settings: Settings) -> None:
    bad, other = (
        Stub("worker-1", "raise SystemExit(2)", lambda: False),
        Stub("worker-2", SLEEP, lambda: False),
    )
    made = supervisor(settings, bad, other)
    assert await made.run() == 1
    assert (await other.started.get()).returncode == -signal.SIGTERM


async def test_a_worker_that_fails_once_the_service_was_up_is_started_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY_S", 0.01)
    good, bad = Stub("worker-1", SLEEP), Stub("worker-2", "raise SystemExit(2)")
    made = supervisor(settings, good, bad)
    made._up.add("worker-1")
    running = asyncio.create_task(made.run())
    for _ in range(3):
        await bad.started.get()
    assert await stopped(made, running) == 0


async def test_a_child_that_has_responded_and_does_so_no_more_is_killed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(workers, "_SICK_S", 0.0)
    responses, looks = iter([False, True, True]), []

    def well() -> bool:
        looks.append(next(responses, False))
        return looks[-1]

    stub = Stub("worker-1", SLEEP, well)
    made = supervisor(settings, stub)
    running = asyncio.create_task(made.run())
    silent = await stub.started.get()
    assert await silent.wait() == -signal.SIGKILL
    again = await stub.started.get()  # which has never responded, so it is given all the time that it needs
    before = len(looks)
    await until(lambda: len(looks) > before + 5, "it was looked at again and again")
    assert again.returncode is None
    assert await stopped(made, running) == 0


@pytest.mark.parametrize(("heeds", "signals", "status"), [(2, 2, 0), (99, 3, -signal.SIGKILL)])
async def test_further_signals_are_passed_on_and_the_third_is_the_last(
    settings: Settings, tmp_path: Path, heeds: int, signals: int, status: int
) -> None:
    """A worker that ends with the second SIGTERM, and one that ends with none."""
    counter = tmp_path / "counter"
    line = (
        "import signal, sys, time\nfrom pathlib import Path\nheard = []\n"
        f"def hear(*_):\n    heard.append(1)\n    Path({str(counter)!r}).write_text(str(len(heard)))\n"
        f"    len(heard) < {heeds} or sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, hear)\nPath({str(counter)!r}).write_text('0')\nwhile True: time.sleep(1)"
    )
    server = settings.server.model_copy(update={"shutdown_s": 3600.0})
    stub = Stub("worker-1", line)
    made = supervisor(settings.model_copy(update={"server": server}), stub)
    running = asyncio.create_task(made.run())
    process = await stub.started.get()
    for number in range(signals):
        await until(lambda n=number: counter.exists() and counter.read_text() == str(n), f"it heard {number}")
        os.kill(os.getpid(), signal.SIGTERM)
    async with within("the supervisor ends"):
        assert await running == 0
    assert process.returncode == status


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"store": {"url": "sqlite:///x.db"}}, "--workers 2 needs PostgreSQL"),
        (
            {"cluster": {"url": "http://127.0.0.1:1", "key": "0123456789abcdef"}},
            "[cluster] url must be left out",
        ),
        ({"server": {"port": 0}}, "a fixed [server] port"),
    ],
)
def test_what_is_not_for_workers(tmp_path: Path, changed: dict[str, dict[str, str]], words: str) -> None:
    base = {"models": {"m": {"path": str(tmp_path)}}, "store": {"url": "postgresql://x@127.0.0.1/none"}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        check(Settings.parse({**base, **changed}), 2)


def test_workers_ports_have_no_metrics_with_an_admin_port(settings: Settings) -> None:
    admin = settings.admin.model_copy(update={"port": free_port()})
    with pytest.raises(ConfigError, match="--targets"):
        check(settings.model_copy(update={"admin": admin}), 2, Path("targets.json"))


def test_workers_are_given_their_engines(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "models": {"m": {"path": "x"}, "frozen": {"path": "y", "train": False}},
        "engine": {"launch": "vllm", "count": 2},
    }
    given = Settings.parse(values)
    engines = {name: [SupervisedEngine(given, name, i) for i in range(2)] for name in given.models}
    for variable, value in workers._environment(given, engines).items():
        monkeypatch.setenv(variable, value)
    seen = Settings.parse(values)
    for name, some in engines.items():
        assert seen.engine_of(name).launch == "external"
        assert seen.engine_of(name).api == "vllm"
        assert seen.engine_of(name).places == tuple(engine.url for engine in some)
    assert seen.cluster.key is not None
