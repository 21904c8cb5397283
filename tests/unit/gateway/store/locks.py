"""Lock waits between transactions of a PostgreSQL database."""

from __future__ import annotations

import time

from gateway.store.connections import connect

_WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def wait_for_a_lock(store_url: str) -> None:
    """Wait until some transaction of the database waits for another one."""
    engine = connect(store_url, 1)
    with engine.connect() as looking:
        deadline = time.monotonic() + 60
        while not looking.exec_driver_sql(_WAITING).scalar():
            assert time.monotonic() < deadline, "no transaction waits"
            looking.rollback()
            time.sleep(0.01)
    engine.dispose()
