"""`scheduler run`: starts, supervises and stops a whole cluster from one file.

Owns all processes: the gateway on this machine; engines and the trainer's ranks (`ranks`) where `tags` places them. Every poll
compares the processes that should run with those that do, so nodes that join and leave, engines that die and a restarted gateway
are all the same case. Invariants: engines are registered with the gateway while they respond and not otherwise; processes stop in
the order trainer, gateway, engines; none is left when `run` returns.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakSet

from headgate.processes.child import LocalProcess
from headgate.processes.errors import GivenUp
from headgate.processes.slow import SILENT_S, reported
from headgate.processes.supervised import Budget, Child, Report, SupervisedProcess
from scheduler.cluster import preflight, sharing
from scheduler.cluster.autoscaler import Autoscaler
from scheduler.cluster.engines import ClusterEngines, cancelled
from scheduler.cluster.errors import ClusterError, Unsatisfied
from scheduler.cluster.file import ClusterFile, check_trainer, memory_of
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.launch import Launcher
from scheduler.cluster.ranks import RankCounts, Ranks
from scheduler.cluster.registry import Registry
from scheduler.cluster.tags import (
    TRAIN,
    Assignment,
    NodeInUse,
    Placement,
    assign,
    beyond,
    check_counts,
    last_spare,
    match,
    next_spare,
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_RESTART_WINDOW_S = 600.0
_GATEWAY_START_S = 120.0
_GATEWAY_STOP_S = 60.0
"""Added to the gateway's `[server] shutdown_s`, in which running calls finish."""
Show = Callable[[Sequence[NodeInUse], Assignment], None]


class Supervisor:
    """Runs a cluster; `check` only shows it."""

    def __init__(self, file: ClusterFile, launcher: Launcher, report: Report, show: Show) -> None:
        """`report` prints a line, `show` a table of nodes. Raise BadFile for unusable files of the gateway or the trainer."""
        self.gateway = GatewayFile.read(file.gateway.config, file.engine.model)
        self._groups = file.wanted()
        if "command" not in file.engine.model_fields_set:
            self.gateway.check_gpus(
                file.engine.gpus, [group.engine_gpus for group in self._groups if group.engines]
            )
        unit = 1
        if file.trainer is not None and file.trainer.config is not None:
            unit = check_trainer(
                file.trainer.config, file.elastic is not None and file.elastic.ranks is not None
            )
        self._counts = RankCounts(file, unit)
        self._file = file
        self._launcher = launcher
        self._report, self._show = report, show
        self._all: WeakSet[SupervisedProcess[Any]] = WeakSet()
        """All supervised processes, also those that are stopping."""
        self._engines = ClusterEngines(file, self.gateway, launcher, self._budget, report, self._all)
        self._names: dict[str, str] = {}
        """The names of the nodes in use, by id, in the order in which they joined."""
        self._nodes: list[NodeInUse] = []
        self._assignment = Assignment((), ())
        self._widest: tuple[Placement, ...] = ()
        """The placements of the greatest number of ranks."""
        ranks = file.trainer.ranks if file.trainer is not None else 1
        self._autoscaler = Autoscaler(file.elastic, ranks, self._record) if file.elastic is not None else None
        self._stop = asyncio.Event()
        self._ranks = self._trainer()
        self._running: asyncio.Task[int] | None = None
        self._trouble = ""

    async def check(self) -> None:
        """Show what would run where. Raise ClusterError, also for missing files and for GPUs with too little memory."""
        for warning in preflight.examine(self._file, self.gateway):
            self._report(warning)
        await self._launcher.open()
        try:
            await self._wait_for_nodes()
            self._show_all()
        finally:
            await self._launcher.close()

    async def run(self) -> int:
        """Run until a signal arrives or the trainer ends (return 0), or a process has failed too often (return 1).

        Raise ClusterError.
        """
        self._running = asyncio.create_task(self._run(), name="cluster")
        self._handle_signals()
        try:
            return await self._running
        except asyncio.CancelledError:
            return 1
        finally:
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _handle_signals(self) -> None:
        """Install the signal handlers. Called again when the launcher is open, since Ray's driver replaces them."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """Stop in order at the first signal, and immediately at the second."""
        if self._stop.is_set() and self._running is not None:
            for process in self._all:
                process.stop_s = 0.0
            self._running.cancel()
        self._stop.set()

    async def _run(self) -> int:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._launcher.close)
            with reported(self._report, f"the launcher {self._file.cluster.launcher!r} to respond"):
                await self._launcher.open()
            self._handle_signals()
            await self._wait_for_nodes()
            self._show_all()
            registry = await stack.enter_async_context(
                Registry(self.gateway, self._report, self._file.unlent)
            )
            stack.push_async_callback(self._engines.stop_all)
            if await registry.responds():
                raise ClusterError(f"another server listens at {self.gateway.admin_url}")
            gateway = self._supervise(stack, self._gateway(registry))
            polling = self._task(stack, self._poll(registry), "poll")
            training = None if self._ranks is None else self._task(stack, self._ranks.run(), "trainer")
            return await self._until({gateway, polling, *([training] if training else [])}, training)

    async def _until(self, tasks: set[asyncio.Task[None]], training: asyncio.Task[None] | None) -> int:
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self._report("the trainer has ended" if training is not None and training.done() else "stopping")
            return 0
        except GivenUp as error:
            self._report(str(error))
            return 1
        finally:
            stop.cancel()

    def _task(self, stack: AsyncExitStack, work: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        stack.push_async_callback(cancelled, task)
        return task

    def _supervise(self, stack: AsyncExitStack, process: SupervisedProcess[Any]) -> asyncio.Task[None]:
        self._all.add(process)
        return self._task(stack, process.run(), process.name)

    def _show_all(self) -> None:
        """Show the nodes, and how engines and ranks share GPUs. Raise OutOfMemory."""
        self._show(self._nodes, self._assignment)
        widest = Assignment(self._assignment.engines, self._widest)
        for line in sharing.shared_nodes(self._nodes, widest, memory_of(self._file, self.gateway)):
            self._report(line)

    # State of processes

    async def _wait_for_nodes(self) -> None:
        """Wait for the nodes of the file. Raise Unsatisfied, which names those that are missing."""
        began = asyncio.get_running_loop().time()
        deadline, reason = began + self._wait_s, ""
        while True:
            found = await self._launcher.discover()
            try:
                nodes = match(self._groups, found, self._names, self._spare)
                check_counts(self._groups, found, nodes)
                self._place(nodes)
                return
            except Unsatisfied as error:
                if asyncio.get_running_loop().time() > deadline or self._stop.is_set():
                    waited = f" (waited {self._wait_s:g} s)" if self._wait_s else ""
                    raise Unsatisfied(f"{error}{waited}") from error
                if str(error) != reason and asyncio.get_running_loop().time() - began >= SILENT_S:
                    reason = str(error)
                    self._report(f"waiting for nodes, for up to {self._wait_s:g} s: {reason}")
            await asyncio.sleep(min(self._file.cluster.poll_interval_s, 1.0))

    @property
    def _wait_s(self) -> float:
        return self._file.ray.wait_s if self._file.cluster.launcher == "ray" else 0.0

    @property
    def _spare(self) -> int | None:
        return None if self._autoscaler is None else self._autoscaler.spare

    def _place(self, nodes: list[NodeInUse]) -> None:
        file, counts = self._file, self._counts.of(nodes)
        most = self._autoscaler.ranks if self._autoscaler is not None else counts[0]
        ranks = max((count for count in counts if count <= most), default=counts[0])
        self._assignment = assign(nodes, file.engine_need, file.trainer_need, ranks)
        self._widest = assign(nodes, file.engine_need, file.trainer_need, counts[-1]).ranks
        if self._autoscaler is not None:
            self._autoscaler.ranks = ranks  # a node that returns joins by the rule, as any other
        self._nodes = nodes
        self._names = self._in_order(nodes)

    def _in_order(self, nodes: Sequence[NodeInUse]) -> dict[str, str]:
        """Return the names of nodes by id, in the order in which they joined."""
        names = {node.discovered.id: node.name for node in nodes}
        return {id_: names[id_] for id_ in (*self._names, *names) if id_ in names}

    async def _refresh_nodes(self) -> None:
        """Use the present nodes, and report those that joined and left."""
        self._use(match(self._groups, await self._launcher.discover(), self._names, self._spare))

    def _use(self, nodes: list[NodeInUse]) -> None:
        """Use these nodes from now on. Report processes that cannot be placed any more, and continue with the others."""
        now = {node.discovered.id: node.name for node in nodes}
        joined = sorted(name for id_, name in now.items() if id_ not in self._names)
        left = sorted(name for id_, name in self._names.items() if id_ not in now)
        if joined or left:
            changes = [
                f"{', '.join(some)} {verb}" for some, verb in ((joined, "joined"), (left, "left")) if some
            ]
            self._report("; ".join(changes))
            self._trouble = ""
        elif not self._trouble:
            return
        try:
            self._place(nodes)
            self._show(self._nodes, self._assignment)
            self._trouble = ""
        except Unsatisfied as error:
            self._nodes, self._names = nodes, self._in_order(nodes)
            placed = [p for p in self._assignment.engines if p.node.discovered.id in self._names]
            self._assignment = Assignment(tuple(placed), self._assignment.ranks)
            if str(error) != self._trouble:
                self._report(f"{error}; the other processes continue")
            self._trouble = str(error)

    # Engines

    async def _poll(self, registry: Registry) -> None:
        """Keep nodes, engines and the gateway's records up to date. Raise GivenUp when the last engine has failed."""
        announced = False
        while True:
            await self._refresh_nodes()
            await self._engines.update(self._assignment.engines, self._widest)
            addresses = self._engines.addresses(self._autoscaler.leaving if self._autoscaler else None)
            known = await registry.update(self._nodes, addresses, self._claimed)
            if known and addresses and self._ranks is not None:
                self._ranks.may_start.set()
            if known and not announced and await registry.responds("/readyz"):
                announced = True
                self._report(self._addresses_text())
            if self._autoscaler is not None:
                await self._rescale(registry, self._autoscaler)
            await asyncio.sleep(self._file.cluster.poll_interval_s)

    async def _rescale(self, registry: Registry, autoscaler: Autoscaler) -> None:
        """Add a spare node, give one back, or change the number of ranks, as the rule decides.

        The processes of a node that is given back end once the gateway has none of its engines, so that their calls continue on
        other nodes.
        """
        leaving = autoscaler.leaving
        if leaving is None:
            ranks = autoscaler.ranks
            if reason := await self._decide(registry, autoscaler):
                self._report(reason)
            if autoscaler.ranks != ranks and self._ranks is not None:
                self._place(self._nodes)
                self._show(self._nodes, self._assignment)
                self._ranks.replace()
        elif last_spare(self._nodes, [leaving.discovered.id], self._trainers) is None:
            autoscaler.finish_leaving(beyond(self._nodes))  # it has left, or replaces a node that has
        elif await registry.has_none(self._engines.on(leaving)):
            rest = [node for node in self._nodes if node.discovered.id != leaving.discovered.id]
            autoscaler.finish_leaving(beyond(rest))
            self._use(rest)

    def _record(self, row: Mapping[str, Any]) -> None:
        """Append a change of `[elastic]`, or what it gave, to `elastic.jsonl`."""
        self._file.cluster.dir.mkdir(parents=True, exist_ok=True)
        with (self._file.cluster.dir / "elastic.jsonl").open("a") as file:
            file.write(json.dumps({"time": time.time(), **row}) + "\n")

    async def _decide(self, registry: Registry, autoscaler: Autoscaler) -> str:
        found, status = await self._launcher.discover(), await registry.status()
        if status is None:
            autoscaler.reset()
            return ""
        warning = autoscaler.observe(asyncio.get_running_loop().time(), status, self._engines.alive())
        if autoscaler.step is None or (steps := await registry.steps(autoscaler.since)) is None:
            return warning
        return autoscaler.decide(
            steps,
            next_spare(self._groups, found, self._names, autoscaler.spare),
            last_spare(self._nodes, list(self._names), self._trainers),
            *self._counts.shifts(self._nodes, self._assignment.ranks),
        )

    @property
    def _claimed(self) -> set[str] | None:
        """The nodes of the trainer, if their number may change."""
        return {one.node.name for one in self._assignment.ranks} if self._counts.can_change else None

    @property
    def _trainers(self) -> frozenset[str]:
        """The tags of the trainer's nodes."""
        return frozenset(self._file.trainer.tags if self._file.trainer is not None else (TRAIN,))

    # Gateway and trainer

    def _gateway(self, registry: Registry) -> SupervisedProcess[Child]:
        table = self._file.gateway
        argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(table.config)]
        argv += ["--workers", str(table.workers)] if table.workers > 1 else []
        log = self._file.cluster.dir / "gateway.log"

        async def start() -> list[Child]:
            return [Child(await LocalProcess.start("gateway", argv, log))]

        return SupervisedProcess(
            "gateway",
            start,
            self._budget(),
            self._report,
            healthy=lambda _running: registry.responds(),
            start_s=_GATEWAY_START_S,
            stop_s=_GATEWAY_STOP_S + self.gateway.shutdown_s,
        )

    def _trainer(self) -> Ranks | None:
        table, need = self._file.trainer, self._file.trainer_need
        if table is None or need is None:
            return None
        ranks = Ranks(table, need, self._launcher, self._rank_placements, self._budget(), self._report)
        self._all.add(ranks.process)
        return ranks

    def _rank_placements(self) -> Sequence[Placement]:
        """Return the placements of the ranks. Raise Unsatisfied if the node of one has left."""
        present, ranks = set(self._names), self._assignment.ranks
        if lost := sorted({one.node.name for one in ranks if one.node.discovered.id not in present}):
            raise Unsatisfied(f"node {', '.join(lost)} has left, and no other node can run the trainer")
        return ranks

    def _budget(self) -> Budget:
        return Budget(self._file.cluster.restarts, _RESTART_WINDOW_S)

    def _addresses_text(self) -> str:
        gateway, logs = self.gateway, self._file.cluster.dir
        return (
            f"{self._file.cluster.name} is up: agents at {gateway.url}/v1, admin API at {gateway.admin_url}/admin/v1/engines,"
            f" logs in {logs}; Ctrl-C stops everything"
        )
