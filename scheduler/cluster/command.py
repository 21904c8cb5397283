"""`scheduler run CLUSTER.toml`: the choice of the launcher, and the output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headgate.extras import install_command
from scheduler.cluster.errors import MissingRay
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.launch import Launcher
from scheduler.cluster.machine import LocalLauncher
from scheduler.cluster.supervisor import Supervisor
from scheduler.cluster.tags import Assignment, NodeInUse


def run(path: Path, check: bool) -> int:
    """Run a cluster, or only show what would run where. Return the exit status. Raise ClusterError."""
    file = ClusterFile.load(path)
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def show(nodes: Sequence[NodeInUse], assignment: Assignment) -> None:
        console.print(_table(file, nodes, assignment))

    supervisor = Supervisor(file, LAUNCHERS[file.cluster.launcher](file), console.print, show)
    if check:
        asyncio.run(supervisor.check())
        return 0
    return asyncio.run(supervisor.run())


def _ray(file: ClusterFile) -> Launcher:
    try:
        from scheduler.cluster.ray import RayLauncher
    except ImportError as error:
        if error.name != "ray":
            raise
        raise MissingRay(
            f"launcher = 'ray' needs Ray, an extra of headgate: {install_command('ray')}"
        ) from error
    return RayLauncher(file)


LAUNCHERS: dict[str, Callable[[ClusterFile], Launcher]] = {"local": LocalLauncher, "ray": _ray}
"""The launchers by `[cluster] launcher`."""


def _table(file: ClusterFile, nodes: Sequence[NodeInUse], assignment: Assignment) -> Table:
    table = Table("node", "tags", "zone", "hardware", "has", "does", title=f"{file.cluster.name}: nodes")
    for node in nodes:
        has = node.discovered.capacity
        size = f"{has.cpus:g} cpus, {has.gpus} gpus, {has.memory_gb:.0f} GiB"
        tags = ", ".join(node.group.tags)
        table.add_row(node.name, tags, node.group.zone, node.group.hardware, size, assignment.roles(node))
    return table
