"""When a checkpoint is written, and what may go on meanwhile.

With `[checkpoint] every = 1`, a checkpoint is whole before its batch is acknowledged: no start needs more than the newest.
Above 1 the versions since the newest whole checkpoint are replayed in any case: there it is written beside what follows, of a
copy, and is whole before the next version is published. At the end of a run it is whole before the last version is published.
"""

from __future__ import annotations

import asyncio

from trainer.learner import Learner
from trainer.loop.children import Watched
from trainer.loop.threads import in_thread


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, learner: Learner, every: int, steps: int) -> None:
        """One after each `every` steps, and one after `steps`, which end the run."""
        self._learner = learner
        self._every, self._steps = every, steps
        self._begun = asyncio.Event()

    async def after_step(self) -> None:
        """Waits for the one that is being written, and writes or begins another if it is due. Raises CheckpointError."""
        await self.written()
        done = self._learner.steps
        if self._every == 1 or done >= self._steps:
            await self.write()
        elif done % self._every == 0:
            await in_thread(self._learner.begin_checkpoint)
            self._begun.set()

    async def after_replay(self) -> None:
        """Writes the checkpoint that was due in the replayed steps and did not become whole, if there is one."""
        learner = self._learner
        assert learner.saved is not None
        if learner.version - learner.saved.version >= self._every:
            await self.write()

    async def write(self) -> None:
        """Writes the checkpoint from which the steps before need never be repeated."""
        await in_thread(self._learner.save_checkpoint)

    async def written(self) -> None:
        """Waits until none is being written. Raises CheckpointError or RankLost."""
        await in_thread(self._learner.checkpoint_written)

    def watch(self) -> Watched:
        """The task that fails as soon as a checkpoint cannot be written beside what follows."""
        return Watched("writing of checkpoints", self._watch())

    async def _watch(self) -> None:
        while True:
            await self._begun.wait()
            self._begun.clear()
            await self.written()
