"""`gateway serve --workers N`: one process that starts the others, and starts them anew when they end.

Owns the worker processes, each a whole gateway with a port of its own for the other ones, and the engines, unless these are
external: an engine outlives the worker that decides about it. Which worker decides is the workers' own affair. Invariants: every
child dies with this process; SIGTERM ends the workers first, and only then the engines; a child that ends, or that answers no
more, is started again, a little later each time; but a worker that fails before any worker was ever up ends everything, for so
will the next.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import httpx

from gateway.engines.process import connect, launch, spoken
from gateway.sections.environment import ENGINE_URLS
from gateway.server import bound
from gateway.settings import ConfigError, Settings
from processes.child import ChildDied, LocalProcess
from processes.ports import free_port

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_LONG_LIFE_S = 30.0
_LOOK_EVERY_S = 1.0
_SICK_S = 30.0
"""A child that has answered, and then not for so long, is killed."""
_CLOSE_S = 20.0
"""The time that a child needs to close everything, beyond what running calls are given."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Child(Protocol):
    """A process that is to be there always."""

    name: str

    async def start(self) -> LocalProcess:
        """Starts it; it may not answer yet."""
        ...

    async def healthy(self) -> bool:
        """True if the child answers."""
        ...


class Worker:
    """A gateway process."""

    def __init__(self, name: str, argv: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        self.port = 0
        """A port on the loopback: its own, where all the others are shared."""
        self._argv = argv
        self._environment = environment

    async def start(self) -> LocalProcess:
        """Starts the process, on a new port each time."""
        self.port = free_port()
        own = {"HEADGATE_WORKER": self.name, "HEADGATE_CLUSTER_URL": f"http://127.0.0.1:{self.port}"}
        return await LocalProcess.start(self.name, self._argv, None, self._environment | own)

    async def healthy(self) -> bool:
        async with httpx.AsyncClient(timeout=_LOOK_EVERY_S) as http:
            try:
                return (await http.get(f"http://127.0.0.1:{self.port}/healthz")).is_success
            except httpx.TransportError:
                return False


class KeptEngine:
    """An engine; its port is the same each time."""

    def __init__(self, settings: Settings, model: str, number: int) -> None:
        self.name = f"{model}-{number}"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._model = model
        self._given = settings.models[model]
        self._settings = settings.engine_of(model)

    async def start(self) -> LocalProcess:
        """Starts the engine with the model's first weights: the coordinator has it load the newest."""
        assert self._given.path is not None
        weights = str(self._given.path.resolve())
        return await launch(self.name, self._settings, self._given, self._model, weights, self._port)

    async def healthy(self) -> bool:
        engine = connect(self.name, self.url, spoken(self._settings))
        try:
            return await engine.healthy()
        finally:
            await engine.close()


class Supervisor:
    """`run` is all of it."""

    def __init__(
        self,
        settings: Settings,
        config: Path,
        workers: int,
        verbose: bool = False,
        targets: Path | None = None,
    ) -> None:
        """`targets`: a file that always says where Prometheus finds the workers, in its own form (file_sd)."""
        self._server = settings.server
        self._targets = targets
        self._engines = _engines(settings)
        environment = _environment(settings, self._engines)
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
        argv += ["--verbose"] if verbose else []
        self._workers = [Worker(f"worker-{n}", argv, environment) for n in range(1, workers + 1)]
        self._processes: dict[str, LocalProcess] = {}
        self._up: set[str] = set()
        """Whoever has ever answered."""
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """Runs until a signal comes; returns the exit status. Raises ConfigError if the port is taken."""
        host, port = self._server.host, self._server.port
        bound(host, port, False).close()  # only workers may listen here
        loop = asyncio.get_running_loop()
        with closing(bound(host, port, True)):
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._on_signal)
            try:
                return await self._supervise()
            finally:
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)

    async def _supervise(self) -> int:
        engines, workers = self._kept(self._all_engines()), self._kept(self._workers)
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({stop, *engines, *workers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
            return 0
        except (ChildDied, OSError) as error:
            log.critical("%s", error)
            return 1
        finally:
            stop.cancel()
            await self._end(self._workers, workers, self._server.shutdown_s + _CLOSE_S)
            await self._end(self._all_engines(), engines, _CLOSE_S)

    def _on_signal(self) -> None:
        """The second one is passed on, and the third is the last."""
        self._signals += 1
        self._stop.set()
        for process in [self._processes[w.name] for w in self._workers if w.name in self._processes]:
            if self._signals == 2:
                process.terminate()
            elif self._signals > 2:
                process.kill()

    def _kept(self, children: Sequence[Child]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._keep(child), name=f"keep-{child.name}") for child in children]

    async def _keep(self, child: Child) -> None:
        """Starts a child again and again. Raises ChildDied if that is of no use."""
        delay = 0.0
        while True:
            began = time.monotonic()
            process = self._processes[child.name] = await child.start()
            self._tell_targets()
            watching = asyncio.create_task(self._watch(child, process), name=f"watch-{child.name}")
            try:
                status = await process.wait()
            finally:
                watching.cancel()
                await asyncio.wait({watching})
            process.kill()  # kill what the process left behind
            if status > 0 and isinstance(child, Worker) and not self._up:
                raise ChildDied(f"{child.name} ended with {status} before it was up; what it said is above")
            delay = delay_s(delay, time.monotonic() - began)
            log.error("%s ended with %d; it is started again in %.1f s", child.name, status, delay)
            await asyncio.sleep(delay)

    async def _watch(self, child: Child, process: LocalProcess) -> None:
        """Sees when a child is up, and kills one that has been silent for too long since."""
        answered: float | None = None
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if await child.healthy():
                if answered is None:
                    self._up |= {child.name} if isinstance(child, Worker) else set()
                    log.info("%s is up (process %d)", child.name, process.pid)
                answered = time.monotonic()
            elif answered is not None and time.monotonic() - answered > _SICK_S:
                log.error("%s has not answered for %g s", child.name, _SICK_S)
                process.kill()

    async def _end(
        self, children: Sequence[Child], keepers: list[asyncio.Task[None]], grace_s: float
    ) -> None:
        if not keepers:
            return
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
        left = [self._processes[child.name] for child in children if child.name in self._processes]
        await asyncio.gather(*(process.stop(grace_s) for process in left))

    def _all_engines(self) -> list[KeptEngine]:
        return [engine for some in self._engines.values() for engine in some]

    def _tell_targets(self) -> None:
        if self._targets is None:
            return
        found = [
            {"targets": [f"127.0.0.1:{worker.port}"], "labels": {"worker": worker.name}}
            for worker in self._workers
            if worker.port
        ]
        self._targets.parent.mkdir(parents=True, exist_ok=True)
        aside = self._targets.with_suffix(".tmp")
        aside.write_text(json.dumps(found))
        os.replace(aside, self._targets)


def check(settings: Settings, workers: int, targets: Path | None = None) -> None:
    """Raises ConfigError if these settings are not for several workers."""
    if targets is not None and settings.admin.port is not None:
        raise ConfigError("--targets names ports at which there are no metrics if [admin] port is set")
    if not settings.store.url.startswith("postgres"):
        raise ConfigError(
            f"--workers {workers} needs PostgreSQL, as they share what is stored: [store] url = 'postgresql://...'"
        )
    if settings.cluster.url is not None:
        raise ConfigError("[cluster] url is of one process: with --workers each has its own, so leave it out")
    if settings.server.port == 0:
        raise ConfigError("--workers needs a [server] port that they all know, and 0 is none")


def delay_s(before_s: float, lived_s: float) -> float:
    """The pause before a child that lived so long is started again, if the last pause was `before_s`."""
    if lived_s >= _LONG_LIFE_S:
        return _FIRST_DELAY_S
    return min(max(2 * before_s, _FIRST_DELAY_S), _LONGEST_DELAY_S)


def _engines(settings: Settings) -> dict[str, list[KeptEngine]]:
    """Yields the engines of each model that are to be started."""
    return {
        name: [KeptEngine(settings, name, i) for i in range(settings.engine_of(name).count)]
        for name, model in settings.models.items()
        if model.upstream is None and settings.engine_of(name).launch != "external"
    }


def _environment(settings: Settings, engines: dict[str, list[KeptEngine]]) -> dict[str, str]:
    """The environment of all workers."""
    key = settings.cluster.key
    urls = {name: [engine.url for engine in some] for name, some in engines.items() if some}
    return {
        "HEADGATE_CLUSTER_KEY": key.get_secret_value() if key else secrets.token_urlsafe(32),
        ENGINE_URLS: json.dumps(urls) if urls else "",
    }
