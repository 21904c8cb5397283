"""Processes that start at the same moment on a database without tables: one of them makes these, the others wait for it."""

from __future__ import annotations

import traceback
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from sqlalchemy import text

from gateway.config import StoreSettings
from gateway.store.connections import connect
from gateway.store.schema import bring_up_to_date, newest_revision
from tests.harness.forks import forks, keep_what_is_loaded

TRIES = 3
LIMIT_S = 120.0


def start(urls: list[str], together: Barrier, results: Queue[str]) -> None:
    """Migrate each database when both processes are ready."""
    keep_what_is_loaded()
    for url in urls:
        engine = connect(url, 1)
        together.wait(LIMIT_S)
        try:
            bring_up_to_date(engine, StoreSettings(url=url))
            with engine.connect() as connection:
                results.put(str(connection.scalar(text("SELECT version_num FROM alembic_version"))))
        except Exception:
            results.put(traceback.format_exc())
        finally:
            engine.dispose()


def test_two_processes_that_start_together_make_the_tables_of_sqlite_once(tmp_path: Path) -> None:
    """`test_migrations.py` has PostgreSQL, where a lock makes them meet."""
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(TRIES)]
    forking = forks()
    together, results = forking.Barrier(2), forking.Queue()
    processes = [forking.Process(target=start, args=(urls, together, results), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=LIMIT_S) for _ in range(2 * TRIES)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert found == [newest_revision()] * (2 * TRIES)
