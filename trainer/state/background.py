"""A checkpoint that is written while training goes on: at most one at a time.

Owns the thread that writes. What it writes is a copy, so that the next steps do not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.state.checkpoint import CheckpointMeta


class Background:
    """The checkpoint of this rank that is being written, if there is one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointMeta] | None = None

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, write: Callable[[], CheckpointMeta]) -> None:
        """Begins to write; the one before has to be written."""
        assert not self.busy
        self._writing = self._thread.submit(write)

    def written(self) -> CheckpointMeta | None:
        """Waits for the checkpoint that was begun last, if any was. Raises what its writing raised."""
        return None if self._writing is None else self._writing.result()
