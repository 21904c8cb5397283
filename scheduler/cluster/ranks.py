"""The trainer's ranks: where they are, started as torchrun would, restarted together, and more or fewer of them.

Owns the process group of the trainer. It starts once the gateway knows engines, since those may sleep until the trainer releases
their node. Where ranks are is `places`'s affair (`tags`); after a change of their number they are started anew from the newest
checkpoint, which any number of ranks goes on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from processes.supervised import Restarts, Say, SupervisedProcess
from scheduler.cluster.file import ClusterFile, TrainerTable
from scheduler.cluster.launch import Job, Launcher, Running
from scheduler.cluster.tags import Need, Node, Place, assign, rank_counts
from scheduler.policies.elastic import Shift


class Ranks:
    """The trainer of a cluster. `run` is all of it."""

    def __init__(
        self,
        table: TrainerTable,
        need: Need,
        launcher: Launcher,
        places: Callable[[], Sequence[Place]],
        restarts: Restarts,
        say: Say,
    ) -> None:
        """`places`: of all ranks, in their order; raises ClusterError where one has none."""
        self._table, self._need = table, need
        self._launcher, self._places = launcher, places
        self.may_start = asyncio.Event()
        """The gateway has been told of every engine that was up."""
        self.kept = SupervisedProcess("trainer", self.start, restarts, say, stop_s=table.stop_s, may_end=True)

    async def run(self) -> None:
        """Keeps the trainer until it is done. Raises GivenUp."""
        await self.may_start.wait()
        await self.kept.run()

    def replace(self) -> None:
        """Has the ranks end, and start anew where they are to be now."""
        self.kept.replace()

    async def start(self) -> Sequence[Running]:
        """Starts every rank. Raises ClusterError, ChildDied, or OSError."""
        places = self._places()
        return await self._launcher.start([self._rank(places, rank) for rank in range(len(places))])

    def _rank(self, places: Sequence[Place], rank: int) -> Job:
        """torchrun's environment, and which nodes are the trainer's."""
        table, place = self._table, places[rank]
        nodes = list(dict.fromkeys(place.node.name for place in places))
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(place.number),
            "LOCAL_WORLD_SIZE": str(sum(other.node == place.node for other in places)),
            "GROUP_RANK": str(nodes.index(place.node.name)),
            "MASTER_ADDR": "{first_host}",
            "MASTER_PORT": "{first_port}",
            "HEADGATE_TRAIN_NODES": ",".join(nodes),
        }
        argv: tuple[str, ...] = table.command
        if table.config is not None:
            argv = ("{python}", "-m", "trainer.cli", "run", str(table.config.resolve()))
        return Job(place, argv, env | table.env, trusted=True, reserve=self._need.capacity)


class Numbers:
    """How many ranks the trainer of a cluster may have."""

    def __init__(self, file: ClusterFile, unit: int = 1) -> None:
        """`unit`: more ranks than at first are a multiple of it."""
        self._engine, self._trainer, self._unit = file.engine_need, file.trainer_need, unit
        self._least = file.trainer.ranks if file.trainer is not None else 1
        self._most = file.elastic.ranks if file.elastic is not None else None

    @property
    def change(self) -> bool:
        """True if the number may change."""
        return self._trainer is not None and self._most is not None

    def of(self, nodes: Sequence[Node]) -> list[int]:
        """The numbers of ranks that are possible on these nodes, in ascending order."""
        if self._trainer is None or self._most is None:
            return [self._least]
        return rank_counts(nodes, self._engine, self._trainer, self._least, self._most, self._unit)

    def shifts(self, nodes: Sequence[Node], places: Sequence[Place]) -> tuple[Shift | None, Shift | None]:
        """How training, with ranks at these places, can be given a node more, and a node fewer."""
        counts, now = self.of(nodes), len(places)
        more = next((count for count in counts if count > now), None)
        fewer = next((count for count in reversed(counts) if count < now), None)
        return self._shift(nodes, places, more), self._shift(nodes, places, fewer)

    def _shift(self, nodes: Sequence[Node], before: Sequence[Place], count: int | None) -> Shift | None:
        if count is None:
            return None
        after = assign(nodes, self._engine, self._trainer, count).ranks
        moved = {place.node.seen.id for place in before} ^ {place.node.seen.id for place in after}
        engines = sum(node.group.engines for node in nodes if node.seen.id in moved)
        return Shift(engines, len(before), count)
