"""The trainer's ranks: started as torchrun does, restarted together, and in a number that may change.

Owns the process group of the trainer. It starts once the gateway knows engines, since those may sleep until the trainer releases
their node. Placements come from `placements` (`tags`). After a change of their number the ranks start again from the newest
checkpoint, which any number of ranks can continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headgate.processes.supervised import (
    Report,
    Restarts,
    SupervisedProcess,
)
from scheduler.cluster.file import ClusterFile, TrainerTable
from scheduler.cluster.launch import Job, Launcher, Running
from scheduler.cluster.tags import Need, NodeInUse, Placement, assign, rank_counts
from scheduler.policies.elastic import Shift

_STOP_S = 60.0
"""Seconds until a rank is killed after a request to stop."""


class Ranks:
    """The trainer of a cluster."""

    def __init__(
        self,
        table: TrainerTable,
        need: Need,
        launcher: Launcher,
        placements: Callable[[], Sequence[Placement]],
        restarts: Restarts,
        report: Report,
    ) -> None:
        """`placements` returns those of all ranks, in order; it raises ClusterError if one is missing."""
        self._table, self._need = table, need
        self._launcher, self._placements = launcher, placements
        self.may_start = asyncio.Event()
        """Set once the gateway has all running engines."""
        self.process = SupervisedProcess(
            "trainer", self.start, restarts, report, stop_s=_STOP_S, may_end=True
        )

    async def run(self) -> None:
        """Supervise the trainer until it ends. Raise GivenUp."""
        await self.may_start.wait()
        await self.process.run()

    def replace(self) -> None:
        """Stop the ranks and start them at their present placements."""
        self.process.replace()

    async def start(self) -> Sequence[Running]:
        """Start every rank. Raise ClusterError, ChildDied, or OSError."""
        placements = self._placements()
        return await self._launcher.start([self._rank(placements, rank) for rank in range(len(placements))])

    def _rank(self, placements: Sequence[Placement], rank: int) -> Job:
        """Return a rank's job, with torchrun's environment and the names of the trainer's nodes."""
        table, placement = self._table, placements[rank]
        nodes = list(dict.fromkeys(one.node.name for one in placements))
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placements)),
            "LOCAL_RANK": str(placement.number),
            "LOCAL_WORLD_SIZE": str(sum(other.node == placement.node for other in placements)),
            "GROUP_RANK": str(nodes.index(placement.node.name)),
            "MASTER_ADDR": "{first_host}",
            "MASTER_PORT": "{first_port}",
            "HEADGATE_TRAIN_NODES": ",".join(nodes),
        }
        argv: tuple[str, ...] = table.command
        if table.config is not None:
            argv = ("{python}", "-m", "trainer.cli", "run", str(table.config.resolve()))
        return Job(placement, argv, env | table.env, trusted=True, reserve=self._need.capacity)


class RankCounts:
    """The possible numbers of the trainer's ranks."""

    def __init__(self, file: ClusterFile, unit: int = 1) -> None:
        """Use only multiples of `unit` as numbers above the first."""
        self._engine, self._trainer, self._unit = file.engine_need, file.trainer_need, unit
        self._least = file.trainer.ranks if file.trainer is not None else 1
        self._most = file.elastic.ranks if file.elastic is not None else None

    @property
    def can_change(self) -> bool:
        """True if the number may change."""
        return self._trainer is not None and self._most is not None

    def of(self, nodes: Sequence[NodeInUse]) -> list[int]:
        """Return the numbers of ranks that are possible on these nodes, in ascending order."""
        if self._trainer is None or self._most is None:
            return [self._least]
        return rank_counts(nodes, self._engine, self._trainer, self._least, self._most, self._unit)

    def shifts(
        self, nodes: Sequence[NodeInUse], placements: Sequence[Placement]
    ) -> tuple[Shift | None, Shift | None]:
        """Return the shifts by which training gets a node more and a node fewer, from the present placements."""
        counts, now = self.of(nodes), len(placements)
        more = next((count for count in counts if count > now), None)
        fewer = next((count for count in reversed(counts) if count < now), None)
        return self._shift(nodes, placements, more), self._shift(nodes, placements, fewer)

    def _shift(
        self, nodes: Sequence[NodeInUse], before: Sequence[Placement], count: int | None
    ) -> Shift | None:
        if count is None:
            return None
        after = assign(nodes, self._engine, self._trainer, count).ranks
        moved = {place.node.discovered.id for place in before} ^ {place.node.discovered.id for place in after}
        engines = sum(node.group.engines for node in nodes if node.discovered.id in moved)
        return Shift(engines, len(before), count)
