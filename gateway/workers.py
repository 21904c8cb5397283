"""`gateway serve --workers N`: one process that starts the others and restarts them when they end.

Owns the worker processes, each a complete gateway with its own port for the others, and the engines, unless these are external:
an engine outlives the worker that controls it. The workers elect their coordinator themselves. Invariants: every child dies with
this process; SIGTERM ends the workers first, then the engines; a child that ends or no longer responds is restarted, with growing
pauses; but if a worker fails before any worker was ever up, everything ends, because the next one would fail too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import headgate.processes.supervised
from gateway.config.environment import ENGINE_URLS
from gateway.config.settings import ConfigError, Settings
from gateway.engines.process import api_of, connect, launch
from gateway.server import bound
from headgate.http import responds
from headgate.processes.child import LocalProcess
from headgate.processes.errors import GivenUp
from headgate.processes.ports import free_port
from headgate.processes.supervised import Backoff, Life, SupervisedProcess

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SICK_S = 30.0
"""A child that has responded, and then not for so long, is killed."""
_CLOSE_S = 20.0
"""The time that a child needs to close everything, beyond what running calls are given."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Child(Protocol):
    """A process that is to be there always."""

    name: str

    async def start(self) -> LocalProcess:
        """Start it; it may not respond yet."""
        ...

    async def healthy(self) -> bool:
        """Return true if the child responds."""
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
        """Start the process, on a new port each time."""
        self.port = free_port()
        own = {"HEADGATE_WORKER": self.name, "HEADGATE_CLUSTER_URL": f"http://127.0.0.1:{self.port}"}
        return await LocalProcess.start(self.name, self._argv, None, self._environment | own)

    async def healthy(self) -> bool:
        return await responds(f"http://127.0.0.1:{self.port}/healthz", _LOOK_EVERY_S)


class SupervisedEngine:
    """An engine; its port is the same each time."""

    def __init__(self, settings: Settings, model: str, number: int) -> None:
        self.name = f"{model}-{number}"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._model = model
        self._given = settings.models[model]
        self._settings = settings.engine_of(model)

    async def start(self) -> LocalProcess:
        """Start the engine with the model's first weights: the coordinator has it load the newest."""
        assert self._given.path is not None
        weights = str(self._given.path.resolve())
        return await launch(self.name, self._settings, self._given, self._model, weights, self._port)

    async def healthy(self) -> bool:
        engine = connect(self.name, self.url, api_of(self._settings))
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
        """`targets`: a file that always lists the workers for Prometheus, in its own form (file_sd)."""
        self._server = settings.server
        self._targets = targets
        self._engines = _engines(settings)
        environment = _environment(settings, self._engines)
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)]
        argv += ["--verbose"] if verbose else []
        self._workers = [Worker(f"worker-{n}", argv, environment) for n in range(1, workers + 1)]
        self._processes: dict[str, LocalProcess] = {}
        self._up: set[str] = set()
        """The names of processes that have responded once."""
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """Run until a signal comes; return the exit status. Raise ConfigError if the port is taken."""
        host, port = self._server.host, self._server.port
        for free in bound(host, port, False):  # only workers may listen here
            free.close()
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for reserved in bound(host, port, True):
                stack.enter_context(reserved)
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._on_signal)
            try:
                return await self._supervise()
            finally:
                for number in _SIGNALS:
                    loop.remove_signal_handler(number)

    async def _supervise(self) -> int:
        engines = self._supervision_tasks(self._all_engines(), _CLOSE_S)
        workers = self._supervision_tasks(self._workers, self._server.shutdown_s + _CLOSE_S)
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({stop, *engines, *workers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()
            return 0
        except GivenUp as error:
            log.critical("%s", error)
            return 1
        finally:
            stop.cancel()
            await _end(workers)
            await _end(engines)

    def _on_signal(self) -> None:
        """Pass on the second signal; end on the third."""
        self._signals += 1
        self._stop.set()
        for process in [self._processes[w.name] for w in self._workers if w.name in self._processes]:
            if self._signals == 2:
                process.terminate()
            elif self._signals > 2:
                process.kill()

    def _supervision_tasks(self, children: Sequence[Child], stop_s: float) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._keep(child, stop_s), name=f"keep-{child.name}") for child in children
        ]

    async def _keep(self, child: Child, stop_s: float) -> None:
        """Start a child again and again. Raise GivenUp if that is of no use."""

        async def start() -> list[headgate.processes.supervised.Child]:
            process = self._processes[child.name] = await child.start()
            try:
                self._write_targets()
            except OSError:
                process.kill()
                raise
            return [headgate.processes.supervised.Child(process)]

        async def healthy(_: headgate.processes.supervised.Child) -> bool:
            healthy = await child.healthy()
            if healthy and not kept.up.is_set():
                self._up |= {child.name} if isinstance(child, Worker) else set()
                log.info("%s is up (process %d)", child.name, self._processes[child.name].pid)
            return healthy

        kept = SupervisedProcess(
            child.name,
            start,
            _Restarts(child, self._up),
            lambda text: log.error("%s", "; ".join(text.rsplit("\n  ", 1))),
            healthy=healthy,
            start_s=math.inf,
            silent_s=_SICK_S,
            stop_s=stop_s,
            silent_stop_s=0.0,
            look_s=(_LOOK_EVERY_S, _LOOK_EVERY_S),
        )
        await kept.run()

    def _all_engines(self) -> list[SupervisedEngine]:
        return [engine for some in self._engines.values() for engine in some]

    def _write_targets(self) -> None:
        if self._targets is None:
            return
        found = [
            {"targets": [f"127.0.0.1:{worker.port}"], "labels": {"worker": worker.name}}
            for worker in self._workers
            if worker.port
        ]
        self._targets.parent.mkdir(parents=True, exist_ok=True)
        partial = self._targets.with_suffix(".tmp")
        partial.write_text(json.dumps(found))
        os.replace(partial, self._targets)


def check(settings: Settings, workers: int, targets: Path | None = None) -> None:
    """Raise ConfigError if these settings are not for several workers."""
    if targets is not None and settings.admin.port is not None:
        raise ConfigError(
            "--targets cannot name the metrics' ports if [admin] port is set: leave one of them out"
        )
    if not settings.store.url.startswith("postgres"):
        raise ConfigError(
            f"--workers {workers} needs PostgreSQL, as they share what is stored: [store] url = 'postgresql://...'"
        )
    if settings.cluster.url is not None:
        raise ConfigError("[cluster] url must be left out with --workers: each process gets a URL of its own")
    if settings.server.port == 0:
        raise ConfigError("--workers needs a fixed [server] port: 0 would give each process another")


class _Restarts(Backoff):
    """Unlimited restarts, except where the next start would fail too.

    That is so if the program is missing, or if a worker failed before any was up. Raise GivenUp then.
    """

    def __init__(self, child: Child, up: set[str]) -> None:
        """`up`: the workers that have ever responded."""
        super().__init__()
        self._child = child
        self._up = up

    def after(self, life: Life) -> float | None:
        if not life.started:
            raise GivenUp(f"{self._child.name} {life.reason}")
        if (life.status or 0) > 0 and isinstance(self._child, Worker) and not self._up:
            raise GivenUp(
                f"{self._child.name} ended with {life.status} before it was up; its output is above"
            )
        return super().after(life)


async def _end(watchers: list[asyncio.Task[None]]) -> None:
    """End the children of some tasks at the same time, and wait until they have ended."""
    for keeper in watchers:
        keeper.cancel()
    if watchers:
        await asyncio.wait(watchers)


def _engines(settings: Settings) -> dict[str, list[SupervisedEngine]]:
    """Yield the engines of each model that are to be started."""
    return {
        name: [SupervisedEngine(settings, name, i) for i in range(settings.engine_of(name).count)]
        for name, model in settings.models.items()
        if model.upstream is None and settings.engine_of(name).launch != "external"
    }


def _environment(settings: Settings, engines: dict[str, list[SupervisedEngine]]) -> dict[str, str]:
    key = settings.cluster.key
    urls = {name: [engine.url for engine in some] for name, some in engines.items() if some}
    return {
        "HEADGATE_CLUSTER_KEY": key.get_secret_value() if key else secrets.token_urlsafe(32),
        ENGINE_URLS: json.dumps(urls) if urls else "",
    }
