"""Which process serves a SQLite database: the first, until it ends.

PostgreSQL serves several, which elect a coordinator; on SQLite a second process would take that role from the first for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from gateway.config.settings import ConfigError
from headgate.processes.lock import LockHeld, holder, lock


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Keep the database at `url` from other gateways for a block. Raise ConfigError if another one has it."""
    database = _file_of(url)
    with ExitStack() as stack:
        if database:
            try:
                stack.enter_context(lock(_lock_of(database)))
            except LockHeld as error:
                raise ConfigError(f"[store] url: {in_use(database, error.process)}: {REMEDY}") from error
            except OSError:
                pass  # the folder cannot be written, which opening the database reports
        yield


REMEDY = "end that one, name another file, or use PostgreSQL"


def in_use(database: str, process: str) -> str:
    """Return the words for a SQLite file that a process serves."""
    return f"{database} is used by the process {process}, and SQLite serves one gateway"


def holder_of(url: str) -> str:
    """Return the process that serves the database at `url`; empty: none, or it is not SQLite."""
    database = _file_of(url)
    return holder(_lock_of(database)) if database else ""


def folder_of(url: str) -> Path | None:
    """Return the folder of a SQLite database; None: it is none."""
    database = _file_of(url)
    return Path(database).parent if database else None


def _lock_of(database: str) -> Path:
    return Path(f"{database}.lock")


def _file_of(url: str) -> str:
    """Return the file of a SQLite database; empty for any other, and for what opening it refuses."""
    try:
        where = make_url(url)
    except ArgumentError:
        return ""
    sqlite = where.get_backend_name() == "sqlite" and where.database != ":memory:"
    return (where.database or "") if sqlite else ""
