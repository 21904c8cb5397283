"""The nodes of one machine: parts of it that the cluster file names, with child processes on them.

Processes listen on the loopback interface. GPUs are assigned in the order of the file: a node with `gpus = 2` has the next two.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from headgate.processes.supervised import Child
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.launch import SECRET, Job, Running, filled, visible
from scheduler.cluster.tags import NODE_LABEL, Capacity, DiscoveredNode

HOST = "127.0.0.1"


class LocalRunning(Child):
    """A process on this machine."""

    def __init__(self, process: LocalProcess, port: int) -> None:
        super().__init__(process)
        self.host = HOST
        self.port = port
        self.pid = process.pid


class LocalLauncher:
    """Starts processes on this machine."""

    def __init__(self, file: ClusterFile) -> None:
        whole = Capacity(float(os.cpu_count() or 1), 0, _memory_gb())
        self._logs = file.cluster.dir
        self._nodes: list[DiscoveredNode] = []
        self._first_gpu: dict[str, int] = {}
        gpus = 0
        for name, node in file.nodes.items():
            capacity = node.capacity(whole)
            self._nodes.append(DiscoveredNode(name, {NODE_LABEL: name}, capacity, HOST))
            self._first_gpu[name] = gpus
            gpus += capacity.gpus

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Do nothing: the supervisor stops each process."""

    async def discover(self) -> list[DiscoveredNode]:
        return list(self._nodes)

    async def start(self, jobs: Sequence[Job]) -> list[Running]:
        started: list[LocalRunning] = []
        first = {"first_host": HOST, "first_port": str(free_port())}
        try:
            for job, devices in zip(jobs, visible(jobs, [self._gpus(job) for job in jobs]), strict=True):
                port = free_port()
                values = {**first, "python": sys.executable, "host": HOST, "port": str(port)}
                argv = [filled(part, values) for part in job.argv]
                env = environment(job, values, os.environ) | devices
                log = self._logs / f"{job.placement.name}.log"
                started.append(
                    LocalRunning(await LocalProcess.start(job.placement.name, argv, log, env), port)
                )
        except BaseException:
            for running in started:
                await running.stop(0)
            raise
        return list(started)

    def _gpus(self, job: Job) -> list[str]:
        """Return this machine's numbers of a job's GPUs."""
        first = self._first_gpu[job.placement.node.discovered.id]
        return [str(first + device) for device in job.placement.devices]


def environment(job: Job, values: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the changes to the inherited environment of a process."""
    hidden = {} if job.trusted else {key: "" for key in inherited if key.startswith(SECRET)}
    return hidden | {key: filled(value, values) for key, value in job.env.items()}


def _memory_gb() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
