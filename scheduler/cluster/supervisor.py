"""`scheduler run`: a whole cluster from one file, started, tended and ended.

Owns everything that runs: the gateway, here; engines and the trainer's ranks (`ranks`) where `tags` places them. Every look
compares what should run with what does, so nodes that join and leave, engines that die and a gateway that was restarted are all
the same case. Invariants: engines are registered with the gateway while they answer and not otherwise; everything ends in the
order trainer, gateway, engines; nothing is left when `run` is over.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import httpx

from processes.child import LocalProcess
from processes.errors import GivenUp
from processes.ports import url_of
from processes.slow import SILENT_S, reported
from processes.supervised import Budget, Child, Say, SupervisedProcess
from scheduler.cluster import preflight, sharing
from scheduler.cluster.errors import ClusterError, Unsatisfied
from scheduler.cluster.file import ClusterFile, check_trainer, memory_of
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.growth import Growth
from scheduler.cluster.launch import Job, Launcher, Running, filled
from scheduler.cluster.ranks import Numbers, Ranks
from scheduler.cluster.registry import Address, Registry
from scheduler.cluster.tags import (
    TRAIN,
    Assignment,
    Capacity,
    Node,
    Place,
    assign,
    beyond,
    check_counts,
    last_spare,
    match,
    next_spare,
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Show = Callable[[Sequence[Node], Assignment], None]


@dataclass(slots=True)
class Engine:
    """An engine that should run, and the task that keeps it."""

    place: Place
    kept: SupervisedProcess[Running]
    task: asyncio.Task[None]


class Supervisor:
    """`run` is all of it; `check` stops before anything is started."""

    def __init__(self, file: ClusterFile, launcher: Launcher, say: Say, show: Show) -> None:
        """`say` tells a line, `show` a table of nodes. Raises BadFile if the files that the cluster's names are of no use."""
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
        self._numbers = Numbers(file, unit)
        self._file = file
        self._launcher = launcher
        self._say, self._show = say, show
        self._engines: dict[str, Engine] = {}
        self._all: WeakSet[SupervisedProcess[Any]] = WeakSet()
        """Whatever is kept, those that are on their way out too."""
        self._names: dict[str, str] = {}
        """The names of the nodes that are used, by id, in the order in which they joined."""
        self._nodes: list[Node] = []
        self._assignment = Assignment((), ())
        self._widest: tuple[Place, ...] = ()
        """Where ranks may be, now or later."""
        ranks = file.trainer.ranks if file.trainer is not None else 1
        self._growth = Growth(file.elastic, ranks) if file.elastic is not None else None
        self._stop = asyncio.Event()
        self._ranks = self._trainer()
        self._running: asyncio.Task[int] | None = None
        self._trouble = ""

    async def check(self) -> None:
        """Shows what would run where. Raises ClusterError, also for what is not there and what would run out of memory."""
        for warning in preflight.examine(self._file, self.gateway):
            self._say(warning)
        await self._launcher.open()
        try:
            await self._placed_first()
            self._show_all()
        finally:
            await self._launcher.close()

    async def run(self) -> int:
        """Runs until a signal comes or the trainer is done (returns 0), or until a process has been given up (returns 1).
        Raises ClusterError.
        """
        self._running = asyncio.create_task(self._run(), name="cluster")
        self._heed_signals()
        try:
            return await self._running
        except asyncio.CancelledError:
            return 1
        finally:
            for number in _SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _heed_signals(self) -> None:
        """Installs the signal handlers; once more when the launcher is open, for Ray's driver replaces them by its own."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The first ends everything in order; a second one at once."""
        if self._stop.is_set() and self._running is not None:
            for kept in self._all:
                kept.stop_s = 0.0
            self._running.cancel()
        self._stop.set()

    async def _run(self) -> int:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._launcher.close)
            with reported(self._say, f"the launcher {self._file.cluster.launcher!r} to answer"):
                await self._launcher.open()
            self._heed_signals()
            await self._placed_first()
            self._show_all()
            registry = await stack.enter_async_context(Registry(self.gateway, self._say, self._file.unlent))
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=5.0))
            stack.push_async_callback(self._end_engines)
            if await registry.answers():
                raise ClusterError(f"something listens at {self.gateway.admin_url} already")
            gateway = self._kept(stack, self._gateway(registry))
            tending = self._task(stack, self._tend(registry, http), "tend")
            training = None if self._ranks is None else self._task(stack, self._ranks.run(), "trainer")
            return await self._until({gateway, tending, *([training] if training else [])}, training)

    async def _until(self, tasks: set[asyncio.Task[None]], training: asyncio.Task[None] | None) -> int:
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self._say("the trainer is done" if training is not None and training.done() else "stopping")
            return 0
        except GivenUp as error:
            self._say(str(error))
            return 1
        finally:
            stop.cancel()

    def _task(self, stack: AsyncExitStack, work: object, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        stack.push_async_callback(_ended, task)
        return task

    def _kept(self, stack: AsyncExitStack, kept: SupervisedProcess[Any]) -> asyncio.Task[None]:
        self._all.add(kept)
        return self._task(stack, kept.run(), kept.name)

    def _show_all(self) -> None:
        """Shows the nodes, and how those fit whose GPUs have engines and ranks. Raises OutOfMemory."""
        self._show(self._nodes, self._assignment)
        widest = Assignment(self._assignment.engines, self._widest)
        for line in sharing.told(self._nodes, widest, memory_of(self._file, self.gateway)):
            self._say(line)

    # State of processes

    async def _placed_first(self) -> None:
        """Waits for the nodes that the file asks for. Raises Unsatisfied, which says what is missing."""
        began = asyncio.get_running_loop().time()
        deadline, waits = began + self._wait_s, ""
        while True:
            seen = await self._launcher.seen()
            try:
                nodes = match(self._groups, seen, self._names, self._spare)
                check_counts(self._groups, seen, nodes)
                self._place(nodes)
                return
            except Unsatisfied as error:
                if asyncio.get_running_loop().time() > deadline or self._stop.is_set():
                    waited = f" (waited {self._wait_s:g} s)" if self._wait_s else ""
                    raise Unsatisfied(f"{error}{waited}") from error
                if str(error) != waits and asyncio.get_running_loop().time() - began >= SILENT_S:
                    waits = str(error)
                    self._say(f"waiting for nodes, for up to {self._wait_s:g} s: {waits}")
            await asyncio.sleep(min(self._file.cluster.look_s, 1.0))

    @property
    def _wait_s(self) -> float:
        return self._file.ray.wait_s if self._file.cluster.launcher == "ray" else 0.0

    @property
    def _spare(self) -> int | None:
        return None if self._growth is None else self._growth.spare

    def _place(self, nodes: list[Node]) -> None:
        file, counts = self._file, self._numbers.of(nodes)
        most = self._growth.ranks if self._growth is not None else counts[0]
        ranks = max((count for count in counts if count <= most), default=counts[0])
        self._assignment = assign(nodes, file.engine_need, file.trainer_need, ranks)
        self._widest = assign(nodes, file.engine_need, file.trainer_need, counts[-1]).ranks
        if self._growth is not None:
            self._growth.ranks = ranks  # a node that comes back joins by the rule, as any other
        self._nodes = nodes
        self._names = self._in_order(nodes)

    def _in_order(self, nodes: Sequence[Node]) -> dict[str, str]:
        """The names of nodes by id, those that joined first before others."""
        names = {node.seen.id: node.name for node in nodes}
        return {id_: names[id_] for id_ in (*self._names, *names) if id_ in names}

    async def _look(self) -> None:
        """Notes which nodes joined and left."""
        self._use(match(self._groups, await self._launcher.seen(), self._names, self._spare))

    def _use(self, nodes: list[Node]) -> None:
        """Uses these nodes from now on; reports processes that cannot be placed any more, and goes on with the rest."""
        now = {node.seen.id: node.name for node in nodes}
        joined = sorted(name for id_, name in now.items() if id_ not in self._names)
        left = sorted(name for id_, name in self._names.items() if id_ not in now)
        if joined or left:
            told = [
                f"{', '.join(some)} {verb}" for some, verb in ((joined, "joined"), (left, "left")) if some
            ]
            self._say("; ".join(told))
            self._trouble = ""
        elif not self._trouble:
            return
        try:
            self._place(nodes)
            self._show(self._nodes, self._assignment)
            self._trouble = ""
        except Unsatisfied as error:
            self._nodes, self._names = nodes, self._in_order(nodes)
            there = [p for p in self._assignment.engines if p.node.seen.id in self._names]
            self._assignment = Assignment(tuple(there), self._assignment.ranks)
            if str(error) != self._trouble:
                self._say(f"{error}; what is left goes on")
            self._trouble = str(error)

    # Engines

    async def _tend(self, registry: Registry, http: httpx.AsyncClient) -> None:
        """Looks again and again. Raises GivenUp when the last engine is given up."""
        told = False
        while True:
            await self._look()
            await self._tend_engines(http)
            known = await registry.update(self._nodes, self._addresses(), self._claimed)
            if known and self._addresses() and self._ranks is not None:
                self._ranks.may_start.set()
            if known and not told and await registry.answers("/readyz"):
                told = True
                self._say(self._where())
            if self._growth is not None:
                await self._rescale(registry, self._growth)
            await asyncio.sleep(self._file.cluster.look_s)

    async def _tend_engines(self, http: httpx.AsyncClient) -> None:
        wanted = {place.name: place for place in self._assignment.engines}
        superfluous = [
            name
            for name, engine in self._engines.items()
            if name not in wanted or engine.place.node.seen.id != wanted[name].node.seen.id
        ]
        for name in superfluous:
            await _ended(self._engines.pop(name).task)
        for name, place in wanted.items():
            if name not in self._engines:
                kept = self._engine(place, http)
                self._all.add(kept)
                task = asyncio.create_task(kept.run(), name=name)
                task.add_done_callback(partial(self._on_engine_ended, name))
                self._engines[name] = Engine(place, kept, task)
        given_up = [engine for engine in self._engines.values() if engine.task.done()]
        if self._engines and len(given_up) == len(self._engines):
            raise GivenUp("every engine is given up; their logs say why")

    def _on_engine_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._say(f"{task.exception()}")

    async def _end_engines(self) -> None:
        engines, self._engines = list(self._engines.values()), {}
        await asyncio.gather(*(_ended(engine.task) for engine in engines))

    def _addresses(self) -> dict[str, Address]:
        """The engines that the gateway should have."""
        leaving = self._growth.leaving if self._growth is not None else None
        return {
            name: Address(
                url_of(engine.kept.running[0].host, engine.kept.running[0].port), engine.place.node.name
            )
            for name, engine in self._engines.items()
            if engine.kept.up.is_set() and engine.kept.running
            if leaving is None or engine.place.node.seen.id != leaving.seen.id
        }

    def _engine(self, place: Place, http: httpx.AsyncClient) -> SupervisedProcess[Running]:
        engine, shared = self._file.engine, any(rank.node == place.node for rank in self._widest)
        group = place.node.group
        values = {
            "config": str(self.gateway.path.resolve()),
            "model": self.gateway.model,
            "gpus": str(group.engine_gpus or self.gateway.gpus),
        }
        argv = tuple(filled(part, values) for part in engine.command)
        reserve = Capacity() if shared else self._file.engine_need.on(group).capacity
        env = {name: filled(value, values) for name, value in engine.env.items()}
        job = Job(place, argv, env, trusted=False, reserve=reserve)

        async def healthy(running: Running) -> bool:
            try:
                return (await http.get(url_of(running.host, running.port) + engine.health)).is_success
            except httpx.HTTPError:
                return False

        return SupervisedProcess(
            place.name,
            partial(self._launcher.start, [job]),
            self._budget(),
            self._say,
            healthy=healthy,
            start_s=engine.start_s,
            silent_s=engine.silent_s,
            stop_s=engine.stop_s,
        )

    async def _rescale(self, registry: Registry, growth: Growth) -> None:
        """Adds a spare node or gives one back, or has the trainer go on with more ranks or fewer, if the rule is for it.

        The processes of a node that is given back end once the gateway has none of its engines any more, so that their calls go
        on elsewhere.
        """
        leaving = growth.leaving
        if leaving is None:
            ranks = growth.ranks
            if why := await self._change(registry, growth):
                self._say(why)
            if growth.ranks != ranks and self._ranks is not None:
                self._place(self._nodes)
                self._show(self._nodes, self._assignment)
                self._ranks.replace()
        elif last_spare(self._nodes, [leaving.seen.id], self._trainers) is None:
            growth.left(beyond(self._nodes))  # it is gone, or has to stand in for a node that is
        elif await registry.has_none(self._engines_on(leaving)):
            rest = [node for node in self._nodes if node.seen.id != leaving.seen.id]
            growth.left(beyond(rest))
            self._use(rest)

    async def _change(self, registry: Registry, growth: Growth) -> str:
        seen, status = await self._launcher.seen(), await registry.status()
        if status is None:
            growth.forget()
            return ""
        return growth.look(
            asyncio.get_running_loop().time(),
            status,
            [name for name, engine in self._engines.items() if not engine.task.done()],
            next_spare(self._groups, seen, self._names, growth.spare),
            last_spare(self._nodes, list(self._names), self._trainers),
            *self._numbers.shifts(self._nodes, self._assignment.ranks),
        )

    @property
    def _claimed(self) -> set[str] | None:
        """The nodes that the trainer has, where their number changes."""
        return {place.node.name for place in self._assignment.ranks} if self._numbers.change else None

    @property
    def _trainers(self) -> frozenset[str]:
        """The tags of nodes that a trainer may have."""
        return frozenset(self._file.trainer.tags if self._file.trainer is not None else (TRAIN,))

    def _engines_on(self, node: Node) -> set[str]:
        return {name for name, engine in self._engines.items() if engine.place.node.seen.id == node.seen.id}

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
            self._say,
            healthy=lambda _running: registry.answers(),
            start_s=table.start_s,
            stop_s=table.stop_s,
        )

    def _trainer(self) -> Ranks | None:
        table, need = self._file.trainer, self._file.trainer_need
        if table is None or need is None:
            return None
        ranks = Ranks(table, need, self._launcher, self._places_of_ranks, self._budget(), self._say)
        self._all.add(ranks.kept)
        return ranks

    def _places_of_ranks(self) -> Sequence[Place]:
        """Raises Unsatisfied if one of them is on a node that is gone."""
        here, places = set(self._names), self._assignment.ranks
        if lost := sorted({place.node.name for place in places if place.node.seen.id not in here}):
            raise Unsatisfied(f"node {', '.join(lost)} is gone, and no other is for the trainer")
        return places

    def _budget(self) -> Budget:
        cluster = self._file.cluster
        return Budget(cluster.restarts, cluster.restart_window_s)

    def _where(self) -> str:
        gateway, logs = self.gateway, self._file.cluster.dir
        return (
            f"{self._file.cluster.name} is up: agents at {gateway.url}/v1, admin API at {gateway.admin_url}/admin/v1/engines,"
            f" logs in {logs}; ctrl-c ends everything"
        )


async def _ended(task: asyncio.Task[None]) -> None:
    """Ends a task, and waits until it has."""
    task.cancel()
    await asyncio.wait({task})
