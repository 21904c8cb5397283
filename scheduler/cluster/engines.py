"""The engines of a cluster: one supervised process for each placement.

Owns their processes and the tasks that supervise them. An engine whose placement no longer exists, or is on another node, is
stopped; one that has used up its restarts stays stopped as long as its placement exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from headgate.http import responds
from headgate.processes.errors import GivenUp
from headgate.processes.ports import url_of
from headgate.processes.supervised import Budget, Report, SupervisedProcess
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.launch import Job, Launcher, Running, filled
from scheduler.cluster.registry import Address
from scheduler.cluster.tags import Capacity, NodeInUse, Placement

_UNHEALTHY_S = 60.0
"""Seconds for which a started engine may be unhealthy before it is killed and restarted."""
_STOP_S = 20.0


@dataclass(slots=True)
class RunningEngine:
    """An engine that should run, and the task that supervises it."""

    placement: Placement
    process: SupervisedProcess[Running]
    task: asyncio.Task[None]


class ClusterEngines:
    """Starts and stops engines so that each placement has one."""

    def __init__(
        self,
        file: ClusterFile,
        gateway: GatewayFile,
        launcher: Launcher,
        budget: Callable[[], Budget],
        report: Report,
        processes: WeakSet[SupervisedProcess[Any]],
    ) -> None:
        """Add every process that is started to `processes`."""
        self._file, self._gateway = file, gateway
        self._launcher, self._budget, self._report = launcher, budget, report
        self._processes = processes
        self._engines: dict[str, RunningEngine] = {}

    async def update(self, placements: Sequence[Placement], train: Sequence[Placement]) -> None:
        """Start and stop engines for these placements. Raise GivenUp when the last engine has failed.

        `train`: where ranks are or may be; an engine there reserves nothing, since the two take turns.
        """
        wanted = {one.name: one for one in placements}
        to_stop = [
            name
            for name, engine in self._engines.items()
            if name not in wanted or engine.placement.node.discovered.id != wanted[name].node.discovered.id
        ]
        for name in to_stop:
            await cancelled(self._engines.pop(name).task)
        for name, placement in wanted.items():
            if name not in self._engines:
                process = self._process(placement, any(rank.node == placement.node for rank in train))
                self._processes.add(process)
                task = asyncio.create_task(process.run(), name=name)
                task.add_done_callback(self._on_ended)
                self._engines[name] = RunningEngine(placement, process, task)
        if self._engines and not self.alive():
            raise GivenUp("all engines failed permanently; see their logs")

    async def stop_all(self) -> None:
        """Stop all engines."""
        engines, self._engines = list(self._engines.values()), {}
        await asyncio.gather(*(cancelled(engine.task) for engine in engines))

    def alive(self) -> list[str]:
        """Return the names of the engines that have not failed permanently."""
        return [name for name, engine in self._engines.items() if not engine.task.done()]

    def on(self, node: NodeInUse) -> set[str]:
        """Return the names of a node's engines."""
        return {
            name
            for name, engine in self._engines.items()
            if engine.placement.node.discovered.id == node.discovered.id
        }

    def addresses(self, leaving: NodeInUse | None) -> dict[str, Address]:
        """Return the engines that the gateway should have: all that respond, but those of a node that is leaving."""
        without = set() if leaving is None else self.on(leaving)
        return {
            name: Address(
                url_of(engine.process.running[0].host, engine.process.running[0].port),
                engine.placement.node.name,
            )
            for name, engine in self._engines.items()
            if name not in without and engine.process.up.is_set() and engine.process.running
        }

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._report(f"{task.exception()}")

    def _process(self, placement: Placement, shared: bool) -> SupervisedProcess[Running]:
        engine, group = self._file.engine, placement.node.group
        values = {
            "config": str(self._gateway.path.resolve()),
            "model": self._gateway.model,
            "gpus": str(group.engine_gpus or self._gateway.gpus),
        }
        argv = tuple(filled(part, values) for part in engine.command)
        reserve = Capacity() if shared else self._file.engine_need.on(group).capacity
        env = {name: filled(value, values) for name, value in engine.env.items()}
        job = Job(placement, argv, env, trusted=False, reserve=reserve)

        async def healthy(running: Running) -> bool:
            return await responds(url_of(running.host, running.port) + engine.health)

        return SupervisedProcess(
            placement.name,
            partial(self._launcher.start, [job]),
            self._budget(),
            self._report,
            healthy=healthy,
            start_s=engine.start_s,
            silent_s=_UNHEALTHY_S,
            stop_s=_STOP_S,
        )


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    await asyncio.wait({task})
