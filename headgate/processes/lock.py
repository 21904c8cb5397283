"""A file lock of the operating system, for a folder or a database that one process may use at a time.

Owns the lock's file, which stays; the lock itself ends with the process, however that ends. Invariant: the file names the
process that holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LockHeld(Exception):
    """Another process holds the lock. `process`: its id, "?" if it has not written it yet."""

    def __init__(self, process: str) -> None:
        super().__init__(f"held by the process {process}")
        self.process = process


def holder(path: Path) -> str:
    """Return the id of the process that holds the lock at `path`, "?" if it has not written it yet; empty: no process does."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "?"
    except OSError:
        pass  # no file, or a file system without locks: `lock` reports what it needs
    return ""


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock at `path` for a block. Raise LockHeld, and OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise LockHeld(file.read().strip() or "?") from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            log.warning("%s: this file system has no locks: make sure that one process alone uses it", path)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
