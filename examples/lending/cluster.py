"""One run of one topology on this machine: engines, gateway, agents and trainer as processes, each bound to its node's core.

A node is a core here: what belongs to a node has that core and no other, so lending gives engines a core that would be idle. Node
r0 also has the gateway and the agents, which every topology needs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headgate.client import GatewayClient
from headgate.http import responds
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port

START_S = 300.0
STEP_S = 180.0
"""The longest that a step may take on average."""
ROLLOUT, TRAIN = "rollout", "train"


@dataclass(frozen=True)
class Topology:
    """The tags of the two nodes. There is an engine on each with the tag `rollout`, and the trainer claims the others."""

    name: str
    about: str
    r0: tuple[str, ...]
    t0: tuple[str, ...]

    @property
    def tags(self) -> dict[str, tuple[str, ...]]:
        """The tags by node."""
        return {"r0": self.r0, "t0": self.t0}

    @property
    def trained_on(self) -> list[str]:
        """The nodes that the trainer claims."""
        return [node for node, tags in self.tags.items() if TRAIN in tags]


TOPOLOGIES = (
    Topology("disaggregated", "r0 samples, t0 trains: without lending", (ROLLOUT,), (TRAIN,)),
    Topology("mixed", "r0 samples, t0 trains and is lent while it waits", (ROLLOUT,), (ROLLOUT, TRAIN)),
    Topology("colocated", "both sample, then both train", (ROLLOUT, TRAIN), (ROLLOUT, TRAIN)),
)


class RunFailed(Exception):
    """A process ended too early, or too late."""


def cores() -> dict[str, str]:
    """Return a core for each node. Raise RunFailed if there are no two."""
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise RunFailed("this needs two cores: one for each node")
    return {"r0": str(found[0]), "t0": str(found[1])}


@dataclass
class Run:
    """One topology, in one folder. Every run has the same model, tasks and seed."""

    topology: Topology
    directory: Path
    model: Path
    tasks: Path
    engine: str
    steps: int
    group_size: int = 8
    concurrency: int = 48
    agent: str = "examples.lending.agent:solve"
    port: int = field(default_factory=free_port)
    engines: dict[str, int] = field(default_factory=dict)
    """The port of the engine on each node that has one."""

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.port}"

    async def run(self) -> None:
        """Train `steps` batches. Raise RunFailed, ChildDied or TimeoutError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.engines = {node: free_port() for node, tags in self.topology.tags.items() if ROLLOUT in tags}
        self._configure()
        at, config = cores(), str(self.directory / "gateway.toml")
        trains = ",".join(at[node] for node in self.topology.trained_on)
        rollout = [
            *("episodes", "run", "--gateway", self.url, "--tasks", str(self.tasks), "--forever"),
            *("--agent", self.agent, "--group-size", str(self.group_size)),
            *("--concurrency", str(self.concurrency)),
        ]
        serve, settings = ["serve", "--config", config], str(self.directory / "trainer.toml")
        async with (
            self._engines(at, config),
            self._process("gateway", at["r0"], "gateway.cli", *serve) as gateway,
            GatewayClient(self.url) as client,
        ):
            await gateway.ready(client.is_ready, START_S)
            async with self._process("trainer", trains, "trainer.cli", "run", settings) as trainer:
                # Else agents fill batches while it starts, and it waits for none.
                await trainer.ready(lambda: self._trainer_waits(client), START_S)
                async with self._process("agents", at["r0"], "gateway.cli", *rollout) as agents:
                    await self._until_trained(trainer, gateway, agents)

    async def _trainer_waits(self, client: GatewayClient) -> bool:
        """Return whether the trainer has released its nodes."""
        nodes = [await client.node(node) for node in self.topology.trained_on]
        return not any(node["reason"].startswith("it was added") for node in nodes)

    async def _until_trained(self, trainer: LocalProcess, *others: LocalProcess) -> None:
        waits = {asyncio.create_task(p.wait(), name=p.name): p for p in (trainer, *others)}
        try:
            limit = self.steps * STEP_S
            done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not done:
            raise RunFailed(f"{self.topology.name}: {self.steps} steps took longer than {limit:g} s")
        ended = waits[done.pop()]
        if ended is not trainer or trainer.returncode:
            raise RunFailed(ended.exit_report())

    @asynccontextmanager
    async def _engines(self, at: dict[str, str], config: str) -> AsyncIterator[None]:
        """Start the engines concurrently, since a start takes long."""
        opened: list[LocalProcess] = []
        try:
            for node, port in self.engines.items():
                given = ["engine", "--config", config, "--port", str(port)]
                argv = ["taskset", "-c", at[node], sys.executable, "-m", "gateway.cli", *given]
                opened.append(await LocalProcess.start(f"engine {node}", argv, self._log(f"engine-{node}")))
            for process, port in zip(opened, self.engines.values(), strict=True):
                health = f"http://127.0.0.1:{port}/health"
                await process.ready(partial(responds, health), START_S)
            yield
        finally:
            for process in opened:
                await process.stop()

    @asynccontextmanager
    async def _process(self, name: str, core: str, *module: str) -> AsyncIterator[LocalProcess]:
        argv = ["taskset", "-c", core, sys.executable, "-m", *module]
        process = await LocalProcess.start(name, argv, self._log(name))
        try:
            yield process
        finally:
            await process.stop()

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _configure(self) -> None:
        """Write the example's TOML files, with what this run adds."""
        folder, here = Path(__file__).parent, self.directory
        gateway = (folder / "gateway.toml").read_text().replace("runs/lending/model", str(self.model))
        if self.engine == "fake":
            before, _, after = gateway.partition("[engine]\n")
            gateway = before + _FAKE + after[after.index("[sampling]") :]
        gateway += f'\n[server]\nport = {self.port}\n[store]\nurl = "sqlite:///{here}/gateway.db"\n'
        gateway += f'[control]\nrecording = "{here}/control.jsonl"\n'
        for node, tags in self.topology.tags.items():
            urls = [f"http://127.0.0.1:{self.engines[node]}"] if node in self.engines else []
            gateway += f"[nodes.{node}]\ntags = {list(tags)}\nurls = {urls}\n"
        (here / "gateway.toml").write_text(gateway)
        trainer = (folder / "trainer.toml").read_text()
        threads = len(self.topology.trained_on)
        trainer = trainer.replace("threads = 1", f"threads = {threads}").replace(
            "[run]\n", f'[run]\ndir = "{here}/trainer"\nsteps = {self.steps}\n'
        )
        trainer += f'\n[model]\npath = "{self.model}"\n'
        trainer += f'[gateway]\nurl = "{self.url}"\nnodes = {self.topology.trained_on}\n'
        (here / "trainer.toml").write_text(trainer)


_FAKE = """[engine]
launch = "fake"
count = 0
args = ["--delay-s", "0.15"]

[update]
probe = false

"""
"""A fake engine does not compute from the weights, so none of a trainer's versions would pass a probe."""
