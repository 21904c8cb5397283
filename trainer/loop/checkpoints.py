"""When a checkpoint is written, and what may continue in the meantime.

A copy of the state is written while publication, acknowledgment and the next steps continue. The batches since the newest whole
checkpoint are trained again after a kill (`replay`). One checkpoint is written at a time: if the next is due earlier, a run with
a fixed `every` waits, and a run with "auto" checks again after the next step. At the end of a run, and when it is stopped,
everything waits until the state is in a checkpoint. A checkpoint that cannot be written ends the run.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from headgate.weights import folders
from trainer.errors import CheckpointDamaged
from trainer.loop.tasks import Companion, in_thread
from trainer.rank_trainer import RankTrainer

Every = int | Literal["auto"]
SHARE = 0.05
"""The largest part of a run's time that saving takes with "auto", if nothing else happened in the meantime."""
MOST = 100
"""With "auto", a checkpoint is due after this many steps in any case, so that a start never trains more of them again."""


def is_due(every: Every, steps: int, since: int, since_s: float, save_s: float | None) -> bool:
    """Return whether a checkpoint is due after step `steps` of the run. Pure.

    `since`, `since_s`: the steps and seconds since the newest was begun. `save_s`: the seconds that one takes; None if none was
    measured, so that the first step measures it.
    """
    if every != "auto":
        return steps % every == 0
    return save_s is None or since >= MOST or save_s <= SHARE * since_s


class Cadence:
    """When the checkpoints of a run are due, by `[checkpoint] every` and a clock."""

    def __init__(self, trainer: RankTrainer, every: Every) -> None:
        self.every = every
        self._trainer = trainer
        self.started()

    def started(self) -> None:
        """Note that a checkpoint of the current state begins."""
        self._steps, self._began = self._trainer.steps, time.monotonic()

    def is_due(self) -> bool:
        """Return whether a checkpoint is due after the current step."""
        trainer = self._trainer
        if self.every == "auto" and trainer.saving:
            return False
        since_s = time.monotonic() - self._began
        return is_due(self.every, trainer.steps, trainer.steps - self._steps, since_s, trainer.save_s)


class Checkpoints:
    """The checkpoints of a run: one whenever it is due, and one after its last step."""

    def __init__(self, trainer: RankTrainer, every: Every, steps: int) -> None:
        self._trainer = trainer
        self._cadence = Cadence(trainer, every)
        self._steps = steps
        self._begun = asyncio.Event()

    async def leave_damaged(self, consumed: int, *, from_older: bool) -> str:
        """Rename damaged checkpoints if the trainer may continue without them, and return what was done; empty if all are whole.

        It may if no batch was acknowledged after the whole one, so that `consumed` is its version, or with `from_older`. Raise
        CheckpointDamaged if not.
        """
        trainer, version = self._trainer, self._trainer.version
        if not trainer.damaged:
            return ""
        found, older = trainer.damage, folders.name_of(version)
        if consumed > version and not from_older:
            batches = f"batch {version} was"
            if consumed > version + 1:
                batches = f"batches {version} to {consumed - 1} were"
            raise CheckpointDamaged(
                f"{found}; the newest whole one is {older}, after which {batches} acknowledged: restore the files, or start"
                " again with --from-older, which trains from the gateway's record what was acknowledged since, and continues"
                " without it if that does not give the published weights bit by bit"
            )
        await in_thread(trainer.rename_damaged)
        return f"{found}; renamed, and continuing from {older}"

    async def after_step(self) -> None:
        """Begin a checkpoint if one is due, and write one at the end of the run. Raise CheckpointError."""
        if self._trainer.steps >= self._steps:
            await self.write()
        elif self._cadence.is_due():
            self._cadence.started()
            await in_thread(self._trainer.begin_checkpoint)
            self._begun.set()

    async def after_replay(self) -> None:
        """Write the checkpoint that was due in the replayed steps and is not whole, if there is one."""
        trainer, every = self._trainer, self._cadence.every
        assert trainer.saved is not None
        if every == "auto" or trainer.version - trainer.saved.version >= every:
            await self.write()

    async def before_stop(self) -> None:
        """Write the steps since the newest checkpoint, unless the weights are offloaded. Raise CheckpointError or RankLost."""
        await self.written()
        trainer = self._trainer
        if not trainer.offloaded and trainer.saved is not None and trainer.version > trainer.saved.version:
            await self.write()

    async def write(self) -> None:
        """Write the checkpoint from which the steps before need never be repeated. Raise CheckpointError."""
        self._cadence.started()
        await in_thread(self._trainer.save_checkpoint)

    async def written(self) -> None:
        """Wait until no checkpoint is being written. Raise CheckpointError or RankLost."""
        await in_thread(self._trainer.checkpoint_written)

    def watch(self) -> Companion:
        """Return the task that fails as soon as a checkpoint cannot be written during training."""
        return Companion("writing of checkpoints", self._watch())

    async def _watch(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            await self.written()
