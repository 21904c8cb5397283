"""When a checkpoint is written, and what may go on meanwhile.

A copy of the state is written while publication, acknowledgement and the next steps go on. The batches since the newest whole
checkpoint are trained again after a kill (`replay`). One is written at a time: where it still is when the next is due, a run with
a fixed `every` waits for it, and one with "auto" goes on and looks again after the next step. At the end of a run, and when it is
stopped, everything waits until the state is in a checkpoint. One that cannot be written ends the run.
"""

from __future__ import annotations

import asyncio
import time

from gateway.weights import folders
from trainer.errors import CheckpointDamaged
from trainer.learner import Learner
from trainer.loop.children import Watched
from trainer.loop.threads import in_thread
from trainer.state import cadence
from trainer.state.cadence import Every


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, learner: Learner, every: Every, steps: int) -> None:
        """One whenever it is due by `every`, and one after `steps`, which end the run."""
        self._learner = learner
        self._every, self._steps = every, steps
        self._begun = asyncio.Event()
        self._since = learner.steps, time.monotonic()
        """Steps and time at which the newest was begun."""

    async def leave_damaged(self, consumed: int, *, from_older: bool) -> str:
        """Rename damaged checkpoints and return what was done, once the learner may go on without them; empty if all are whole.

        It may if no batch was acknowledged after the whole one, so that `consumed` is its version, or `from_older` says so. Raise
        CheckpointDamaged if not.
        """
        learner, version = self._learner, self._learner.version
        if not learner.damaged:
            return ""
        found, older = learner.damage, folders.name_of(version)
        if consumed > version and not from_older:
            batches = f"batch {version} was"
            if consumed > version + 1:
                batches = f"batches {version} to {consumed - 1} were"
            raise CheckpointDamaged(
                f"{found}; the newest whole one is {older}, after which {batches} acknowledged: put the files back, or start"
                " again with --from-older, which trains from the gateway's record what was acknowledged since, and goes on"
                " without it if that does not give the published weights to the bit"
            )
        await in_thread(learner.set_damaged_aside)
        return f"{found}; renamed, and going on from {older}"

    async def after_step(self) -> None:
        """Begin a checkpoint if one is due, and write one at the end of the run. Raise CheckpointError."""
        done = self._learner.steps
        if done >= self._steps:
            await self.write()
        elif self._is_due(done):
            self._since = done, time.monotonic()
            await in_thread(self._learner.begin_checkpoint)
            self._begun.set()

    def _is_due(self, done: int) -> bool:
        if self._every == "auto" and self._learner.saving:
            return False
        steps, began = self._since
        return cadence.is_due(self._every, done, done - steps, time.monotonic() - began, self._learner.save_s)

    async def after_replay(self) -> None:
        """Write the checkpoint that was due in the replayed steps and did not become whole, if there is one."""
        learner = self._learner
        assert learner.saved is not None
        if self._every == "auto" or learner.version - learner.saved.version >= self._every:
            await self.write()

    async def before_stop(self) -> None:
        """Write the steps since the newest checkpoint, unless the weights are offloaded. Raise CheckpointError or RankLost."""
        await self.written()
        learner = self._learner
        if not learner.offloaded and learner.saved is not None and learner.version > learner.saved.version:
            await self.write()

    async def write(self) -> None:
        """Write the checkpoint from which the steps before need never be repeated. Raise CheckpointError."""
        self._since = self._learner.steps, time.monotonic()
        await in_thread(self._learner.save_checkpoint)

    async def written(self) -> None:
        """Wait until none is being written. Raise CheckpointError or RankLost."""
        await in_thread(self._learner.checkpoint_written)

    def watch(self) -> Watched:
        """Return the task that fails as soon as a checkpoint cannot be written while training goes on."""
        return Watched("writing of checkpoints", self._watch())

    async def _watch(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            await self.written()
