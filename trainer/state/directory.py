"""Directories that appear whole or not at all: the trainer writes checkpoints and versions only so."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from headgate.processes.lock import LockHeld, lock
from headgate.weights import folders
from headgate.weights.folders import sync
from trainer.errors import ConfigError, VersionReused
from trainer.state import faults

_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)")


class AtomicDirectory:
    """A directory that appears whole or not at all: filled under another name, fsynced, renamed at the end of the block.

    Raises VersionReused if there is one of the name. What an earlier process left half-written under the name is removed.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")

    def __enter__(self) -> Path:
        if self.target.exists():
            raise VersionReused(f"{self.target} exists; a version is written once")
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.target.parent.glob(f".{self.target.name}.tmp-*"):
            shutil.rmtree(leftover)
        self._temporary.mkdir()
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        for path in (*sorted(p for p in self._temporary.rglob("*")), self._temporary):
            sync(path)
        self._temporary.rename(self.target)
        sync(self.target.parent)


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
