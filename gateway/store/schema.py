"""The tables' form: brought to this build's, once, by whichever process comes first; a newer one is refused."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from gateway.sections import StoreSettings
from gateway.settings import ConfigError
from gateway.store import answers
from gateway.store.connections import (
    connect,
    delays,
    driver,
    is_again,
    is_away,
    is_full,
    is_unusable,
    without_password,
)

log = logging.getLogger(__name__)
_LOCK_WAIT_S = 60.0
_AT_ONCE = 200
_ALEMBIC = threading.Lock()
"""Alembic keeps what it does in a module: one migration at a time in a process."""


def newest_revision() -> str | None:
    """The revision of the tables that this build reads and writes."""
    return ScriptDirectory.from_config(_alembic()).get_current_head()


def bring_up_to_date(engine: Engine, settings: StoreSettings) -> None:
    """Waits for the database, and migrates it if need be. Raises ConfigError where it cannot be used."""
    begun, told = time.monotonic(), False
    for delay in delays():
        try:
            with engine.begin() as connection:
                _check(connection, settings)
                _migrate(connection)
            _fill_in(engine)
            return
        except DBAPIError as error:
            limit = settings.read_wait_s if is_away(error) else _LOCK_WAIT_S
            if is_unusable(error):
                raise ConfigError(_refused(error, settings)) from error
            if not (is_away(error) or is_again(error)):
                raise
            if time.monotonic() - begun > limit:
                raise ConfigError(_unusable(error, settings, limit)) from error
            if not told:
                log.warning("the database is not ready, trying for %g s: %s", limit, _first_line(error))
            told = True
        time.sleep(delay)


def check_form(settings: StoreSettings) -> None:
    """Raises ConfigError unless there is a database whose tables have this build's form; changes nothing."""
    url = driver(settings.url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        raise ConfigError(f"[store] url: no database at {url.database}")
    engine = connect(settings.url, 1)
    try:
        with engine.connect() as connection:
            found, wanted = MigrationContext.configure(connection).get_current_revision(), newest_revision()
    except DBAPIError as error:
        raise ConfigError(f"[store] url = {without_password(settings.url)!r}: {error.orig}") from error
    finally:
        engine.dispose()
    if found != wanted:
        raise ConfigError(
            f"the database has the tables of revision {found or 'none'}, this build's are {wanted}: start the gateway on it once"
        )


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
    if is_away(error):
        return (
            f"{where}: the database cannot be reached (tried for {limit:g} s): {_first_line(error)}."
            " Is the server up, and are host and port right?"
        )
    return f"{where}: its tables could not be migrated within {limit:g} s, others hold locks on them: {error.orig}"


def _check(connection: Connection, settings: StoreSettings) -> None:
    where = f"[store] url = {without_password(settings.url)!r}"
    if connection.dialect.name == "postgresql":
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding != "UTF8":
            raise ConfigError(f"{where}: the database's encoding is {encoding}; it must be UTF8")
    scripts = ScriptDirectory.from_config(_alembic())
    for found in MigrationContext.configure(connection).get_current_heads():
        try:
            scripts.get_revision(found)
        except CommandError as error:
            raise ConfigError(
                f"{where}: the database is newer than this build: its tables are of revision {found!r}, and this build knows"
                f" them up to {scripts.get_current_head()!r}. Start a build that is at least as new"
            ) from error


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # A busy machine may take long between two statements, and others wait as long for the locks anyway.
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout TO '{_LOCK_WAIT_S:g}s'")
    config = _alembic()
    config.attributes["connection"] = connection
    with _ALEMBIC:
        command.upgrade(config, "head")


def _fill_in(engine: Engine) -> None:
    """Fills in columns that older builds have left empty."""
    filled = _AT_ONCE
    while filled == _AT_ONCE:
        with engine.begin() as connection:
            filled = answers.fill_in(connection, _AT_ONCE)
        if filled:
            log.info("%d stored answers of an older build can be listed now", filled)


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    return config
