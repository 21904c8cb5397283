"""No frequent query of the gateway scans a whole big table, on either database: its plan shows it, not its time.

The store is small, so scans are set to be expensive in PostgreSQL; where no index serves, it scans all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from bench.filling import Filled, fill
from bench.store import QUERIES
from gateway.store import retention
from gateway.store.connections import connect
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store, sqlite_store

FILLED = Filled(30_000)
BIG = {"episodes", "calls", "nodes", "decisions", "ledger_events", "exchanges", "answers"}
SMALL = "ix_episodes_unfinished"
"""An index of the rows that are read, and of no others."""
IN_ORDER = {"list", "list_page", "prune_page"}
"""They read an index from one place on, until they have enough."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Engine]:
    """Yield a filled store."""
    path = tmp_path_factory.mktemp("plans") / "store.db"
    url = sqlite_store(path) if request.param == "sqlite" else postgres_store(postgres)
    opened = connect(url, 1)
    fill(opened, FILLED)
    yield opened
    opened.dispose()


@contextmanager
def statements_of(connection: Connection) -> Iterator[list[tuple[str, Any]]]:
    """Yield the statements, with their values, that the block executes."""
    found: list[tuple[str, Any]] = []

    def listen(_connection: Any, _cursor: Any, statement: str, values: Any, *_rest: Any) -> None:
        found.append((statement, values))

    event.listen(connection.engine, "before_cursor_execute", listen)
    try:
        yield found
    finally:
        event.remove(connection.engine, "before_cursor_execute", listen)


def executed(connection: Connection, name: str, seed: int = 1) -> list[tuple[str, Any]]:
    """Return the statements of which a query consists."""
    with statements_of(connection) as found:
        QUERIES[name](FILLED, Random(seed))(connection)
    return found


def scanned(connection: Connection, statement: str, values: Any) -> list[str]:
    """Return the tables that the statement's plan scans without an index."""
    if connection.dialect.name == "sqlite":
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
        plan = [str(row[-1]) for row in rows]
        return [line for line in plan if (m := re.match(r"SCAN (\w+)", line)) and m[1] in BIG]
    connection.execute(text("SET LOCAL enable_seqscan = off"))
    (found,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", values).scalars()
    return [line for line in nodes(found[0]["Plan"]) if line]


def nodes(plan: dict[str, Any]) -> Iterator[str]:
    """Every node that reads a whole big table, or a whole index of one."""
    table, kind = plan.get("Relation Name"), plan["Node Type"]
    sought = "Index Cond" in plan or kind == "Bitmap Heap Scan"
    if table in BIG and not sought and kind != "ModifyTable":
        yield f"{kind} {table} {plan.get('Index Name', '')} {plan.get('Filter', '')}"
    if kind == "Bitmap Index Scan" and not sought:
        yield f"{kind} {plan.get('Index Name', '')}"
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


@pytest.mark.parametrize("name", list(QUERIES))
def test_an_index_serves(engine: Engine, name: str) -> None:
    with engine.connect() as connection:
        statements = executed(connection, name)
        assert statements
        for statement, values in statements:
            whole = [line for line in scanned(connection, statement, values) if SMALL not in line]
            if name in IN_ORDER and "LIMIT" in statement:
                whole = [line for line in whole if "ix_episodes_" not in line]
            assert not whole, statement


def test_a_query_without_an_index_would_be_noticed(engine: Engine) -> None:
    with engine.connect() as connection:
        assert scanned(connection, "SELECT * FROM calls WHERE engine = 'engine-0'", ())
        assert scanned(connection, "SELECT count(*) FROM episodes", ())


def test_lists_are_in_the_order_of_an_index(engine: Engine) -> None:
    """Nothing is sorted that could be long: the page is what an index gives first."""
    with engine.connect() as connection:
        for name in (
            "list",
            "list_page",
            "list_open",
            "list_eval_page",
            "list_agent",
            "list_task",
            "list_model",
        ):
            for statement, values in executed(connection, name):
                assert not sorts(connection, statement, values), (name, statement)


def sorts(connection: Connection, statement: str, values: Any) -> bool:
    if connection.dialect.name == "sqlite":
        rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
        return any("TEMP B-TREE" in str(row[-1]) for row in rows)
    connection.execute(text("SET LOCAL enable_seqscan = off"))
    connection.execute(text("SET LOCAL enable_bitmapscan = off"))
    (found,) = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", values).scalars()
    return '"Sort"' in str(found).replace("'", '"')


def test_decisions_about_groups_are_sought_by_the_groups(engine: Engine) -> None:
    """Their `episode_id` is empty, as that of every other decision about a group."""
    with engine.connect() as connection:
        for name in ("why", "prune_page"):
            found = [one for seed in range(8) for one in executed(connection, name, seed)]
            of_groups = [(s, v) for s, v in found if "decisions.group_id IN" in s and v and len(v) > 1]
            assert of_groups
            for statement, values in of_groups:
                explain = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
                plan = str(connection.exec_driver_sql(f"{explain} {statement}", values).all())
                assert "ix_decisions_group" in plan, plan


def test_deleting_looks_nothing_up_in_whole_tables(engine: Engine) -> None:
    """Neither what belongs to an episode, nor (PostgreSQL) the keys that point at it."""
    with engine.connect() as connection:
        ages = retention.Ages(2e9, 2e9, 2e9)
        with statements_of(connection) as found:
            swept, _ = retention.sweep(connection, ages, None, dry=False)
            retention.forget(connection, 0.0)
        assert swept.deleted.total() > 0
        deletes = [(s, v) for s, v in found if s.startswith("DELETE")]
        assert len(deletes) >= 4
        for statement, values in deletes:
            assert not scanned(connection, statement, values), statement
        connection.rollback()
