"""Processes that start at the same moment on a database without tables: one of them makes these, the others wait for it."""

from __future__ import annotations

import traceback
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.config import StoreSettings
from gateway.store.connections import connect
from gateway.store.schema import bring_up_to_date, newest_revision
from tests.harness.forks import forks, keep_what_is_loaded
from tests.harness.servers import PostgresServer

TRIES = 6
LIMIT_S = 120.0


def start(urls: list[str], together: Barrier, said: Queue[str]) -> None:
    """The body of each process."""
    keep_what_is_loaded()
    for url in urls:
        engine = connect(url, 1)
        together.wait(LIMIT_S)
        try:
            bring_up_to_date(engine, StoreSettings(url=url))
            with engine.connect() as connection:
                said.put(str(connection.scalar(text("SELECT version_num FROM alembic_version"))))
        except Exception:
            said.put(traceback.format_exc())
        finally:
            engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_two_processes_that_start_at_once_make_the_tables_once(
    kind: str, tmp_path: Path, postgres: PostgresServer
) -> None:
    names = [postgres.new_database() for _ in range(TRIES)] if kind == "postgresql" else []
    urls = [postgres.url(name) for name in names] or [
        f"sqlite:///{tmp_path}/{number}.db" for number in range(TRIES)
    ]
    forking = forks()
    together, said = forking.Barrier(2), forking.Queue()
    processes = [forking.Process(target=start, args=(urls, together, said), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    try:
        heard = [said.get(timeout=LIMIT_S) for _ in range(2 * TRIES)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for name in names:
            postgres.drop_database(name)
    assert heard == [newest_revision()] * (2 * TRIES)
