"""A run's folders: one trainer uses them, and removes what earlier processes left there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headgate.processes.lock import LockHeld, lock
from headgate.weights import folders
from trainer.errors import ConfigError
from trainer.state import faults

_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)")


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep a run's folder from other trainers for a block. Raise ConfigError if another one has it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(directory / "run.lock"))
        except LockHeld as error:
            raise ConfigError(
                f"[run] dir: {directory} is used by the trainer process {error.process}: end that one, or name another folder"
            ) from error
        yield


def sweep(directory: Path) -> None:
    """Remove what earlier processes left half-written or half-removed in `directory`, where this process writes nothing now.

    The files of another running process stay. Raise CheckpointError if it cannot be removed.
    """
    with faults.writing(directory):
        folders.sweep(directory)
        for leftover in directory.glob(".*"):
            match = _TEMPORARY.fullmatch(leftover.name)
            if match and not _is_another(int(match[1])):
                shutil.rmtree(leftover)


def _is_another(process: int) -> bool:
    """Return true if a process lives, and is not this one: in a container, a restarted process gets its old number again."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
