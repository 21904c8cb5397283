"""A disk that is full until a test makes room."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, event

ROOM = 2**31 - 2


_RAISE = """
CREATE OR REPLACE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'could not extend file "base/1/2"' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER no_room BEFORE INSERT ON ledger_events EXECUTE FUNCTION no_room()
"""


class Disk:
    """A database's disk, which has room or none: SQLite's own limit of pages, or an error that PostgreSQL raises in a trigger."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pages = ROOM
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", self._limit)
            event.listen(engine, "checkout", lambda raw, record, _proxy: self._limit(raw, record))

    def _limit(self, raw: Any, _record: Any) -> None:
        raw.execute(f"PRAGMA max_page_count={self._pages}")

    def fill(self) -> None:
        """No page can be added any more."""
        self._pages = 1  # SQLite takes as many as there are
        self._execute(_RAISE)

    def make_room(self) -> None:
        """Make room again."""
        self._pages = ROOM
        self._execute("DROP TRIGGER no_room ON ledger_events")

    def _execute(self, statement: str) -> None:
        if self._engine.dialect.name == "postgresql":
            with self._engine.begin() as connection:
                connection.exec_driver_sql(statement)
