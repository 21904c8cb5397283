"""A checkpoint that is written while training goes on: at most one at a time.

Owns the thread that writes, and how long writing took. What it writes is a copy, so that the next steps do not change it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.state.checkpoint import CheckpointMeta


class Background:
    """The checkpoint of this rank that is being written, if there is one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointMeta] | None = None
        self.save_s: float | None = None
        """The seconds that the newest whole checkpoint took; None before it."""

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, write: Callable[[], CheckpointMeta], began: float) -> None:
        """Begin to write; the one before has to be written. `began`: `time.monotonic()` at the start of its copy."""
        assert not self.busy

        def timed() -> CheckpointMeta:
            written = write()
            self.save_s = time.monotonic() - began
            return written

        self._writing = self._thread.submit(timed)

    def written(self) -> CheckpointMeta | None:
        """Wait for the checkpoint that was begun last, if any was. Raise what its writing raised."""
        return None if self._writing is None else self._writing.result()
