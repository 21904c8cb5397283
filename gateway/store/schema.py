"""The revision of the tables: brought to this build's newest, once, by whichever process comes first.

A build works on tables of a newer revision too, as long as every migration since its own only added something: the newer build
writes down the oldest build of which that holds (`compatibility`). Another one is refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, delete, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from gateway.config import StoreSettings
from gateway.config.settings import ConfigError, NotReady
from gateway.store import coordination
from gateway.store.connections import (
    connect,
    delays,
    driver,
    is_disconnected,
    is_full,
    is_retryable,
    is_unusable,
    without_password,
)
from gateway.store.models import CompatibilityRow, CoordinatorRow

log = logging.getLogger(__name__)
OLDEST_BUILD = "0023"
"""The oldest build that works on the newest tables: the newest revision that it knows. A migration that does more than add
something sets this to its own number."""
_LOCK_WAIT_S = 60.0
_GATEWAY = Path(__file__).parents[1]
_MIGRATIONS = next(filter(Path.is_dir, (_GATEWAY / "migrations", _GATEWAY.parent / "migrations")))
"""Within the installed package, or next to it in a source tree."""
_ALEMBIC = threading.Lock()
"""Alembic keeps what it does in a module: one migration at a time in a process."""


def newest_revision() -> str | None:
    """Return the revision of the tables that this build reads and writes."""
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def bring_up_to_date(engine: Engine, settings: StoreSettings) -> None:
    """Wait for the database, and migrates it if need be. Raise ConfigError where it cannot be used."""
    begun, reported = time.monotonic(), False
    for delay in delays():
        try:
            with engine.begin() as connection:
                _check_encoding(connection, settings)
                if _is_newer(connection, settings):
                    log.warning(
                        "the database has tables of a newer build; this one works on them, and changes none"
                    )
                else:
                    _migrate(connection, "head")
            return
        except DBAPIError as error:
            limit = settings.read_wait_s if is_disconnected(error) else _LOCK_WAIT_S
            if is_unusable(error):
                raise ConfigError(_refused(error, settings)) from error
            if not (is_disconnected(error) or is_retryable(error)):
                raise
            if time.monotonic() - begun > limit:
                raise NotReady(_unusable(error, settings, limit)) from error
            if not reported:
                log.warning("the database is not ready, trying for %g s: %s", limit, _first_line(error))
            reported = True
        time.sleep(delay)


def check_form(settings: StoreSettings) -> None:
    """Raise ConfigError unless there is a database on whose tables this build works; changes nothing."""
    found = revision(settings)
    if found == newest_revision():
        return
    with _connected(settings) as connection:
        if not _is_newer(connection, settings):
            raise ConfigError(
                f"the database has the tables of revision {found or 'none'}, this build's are {newest_revision()}:"
                " start the gateway on it once, or run `gateway migrate`"
            )


def revision(settings: StoreSettings) -> str | None:
    """Return the revision of a database's tables; None if it has none. Raise ConfigError where there is no database."""
    url = driver(settings.url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise ConfigError(f"[store] url: no database at {url.database}")
    with _connected(settings) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_back(settings: StoreSettings, to: str) -> bool:
    """Return true if a revision is older than the tables. Raise ConfigError where there is no database."""
    found = revision(settings)
    return found is not None and to < found


def migrate(settings: StoreSettings, to: str) -> None:
    """Bring the tables to a revision that this build knows, forwards or back: `head`, or a revision's number.

    Backwards, what newer revisions added is dropped with its contents. Raise ConfigError for a revision that is not known, and
    backwards while a gateway process runs.
    """
    scripts = ScriptDirectory.from_config(_alembic())
    known = [each.revision for each in scripts.walk_revisions()][::-1]
    found = revision(settings)
    for name in (to, found):
        if name not in (*known, "head", None):
            raise ConfigError(f"this build knows no revision {name!r}; it knows {known[0]} to {known[-1]}")
    target = known[-1] if to == "head" else to
    with _connected(settings) as connection:
        if is_back(settings, target):
            _check_no_process_runs(connection)
        _migrate(connection, target)


def _check_no_process_runs(connection: Connection) -> None:
    if not inspect(connection).has_table(CoordinatorRow.__tablename__):
        return
    coordinator = coordination.current(connection)
    if coordinator is not None and coordinator.left_s > 0:
        raise ConfigError(
            f"a gateway process ({coordinator.holder}) runs on this database: stop all of them before you go back to older tables"
        )


@contextmanager
def _connected(settings: StoreSettings) -> Iterator[Connection]:
    """Yield a connection in a transaction. Raise ConfigError for the database's errors."""
    engine = connect(settings.url, 1)
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        raise ConfigError(f"[store] url = {without_password(settings.url)!r}: {error.orig}") from error
    finally:
        engine.dispose()


def _refused(error: DBAPIError, settings: StoreSettings) -> str:
    where = f"[store] url = {without_password(settings.url)!r}"
    return (
        f"{where}: this database cannot be used: {_first_line(error)}. Name a file, or a server's database and user, that are"
        " headgate's own and may be written"
    )


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _unusable(error: DBAPIError, settings: StoreSettings, limit: float) -> str:
    where = f"[store] url = {without_password(settings.url)!r}"
    if is_full(error):
        return f"{where}: the database's disk is full ({_first_line(error)}): free some space, or set another place"
    if is_disconnected(error):
        return (
            f"{where}: the database cannot be reached (tried for {limit:g} s): {_first_line(error)}."
            " Is the server up, and are host and port right?"
        )
    return f"{where}: its tables could not be migrated within {limit:g} s, others hold locks on them: {error.orig}"


def _check_encoding(connection: Connection, settings: StoreSettings) -> None:
    if connection.dialect.name == "postgresql":
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding != "UTF8":
            where = f"[store] url = {without_password(settings.url)!r}"
            raise ConfigError(f"{where}: the database's encoding is {encoding}; it must be UTF8")


def _is_newer(connection: Connection, settings: StoreSettings) -> bool:
    """Return true if the tables are a newer build's, on which this one works too. Raise ConfigError if it does not."""
    scripts = ScriptDirectory.from_config(_alembic())
    own = scripts.get_current_head() or ""
    for found in MigrationContext.configure(connection).get_current_heads():
        try:
            scripts.get_revision(found)
        except CommandError as error:
            oldest = connection.scalar(select(CompatibilityRow.oldest))
            if oldest is not None and oldest <= own:
                return True
            raise ConfigError(
                f"[store] url = {without_password(settings.url)!r}: the database is newer than this build: its tables are of"
                f" revision {found!r}, and this build knows them up to {own!r}. Start a build that knows them up to"
                f" {oldest or found!r} at least, or go back with the newer build: `gateway migrate --to {own}`"
            ) from error
    return False


def _migrate(connection: Connection, to: str) -> None:
    if connection.dialect.name == "postgresql":
        # A busy machine may take long between two statements, and others wait as long for the locks anyway.
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout TO '{_LOCK_WAIT_S:g}s'")
    config = _alembic()
    config.attributes["connection"] = connection
    with _ALEMBIC:
        found = MigrationContext.configure(connection).get_current_revision() or ""
        (command.downgrade if to < found else command.upgrade)(config, to)
    known = inspect(connection).has_table(CompatibilityRow.__tablename__)
    if known and connection.scalar(select(CompatibilityRow.oldest)) != OLDEST_BUILD:
        connection.execute(delete(CompatibilityRow))
        connection.execute(insert(CompatibilityRow).values(oldest=OLDEST_BUILD))


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config
