"""The migrations make exactly the tables that the models describe, and can be taken back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, text
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config import FeedSettings, StalenessSettings, StoreSettings
from gateway.config.settings import ConfigError
from gateway.store import coordination, ledger, schema, turns
from gateway.store.connections import connect, driver
from gateway.store.database import Database
from gateway.store.models import Base
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from tests.harness.forks import forks, keep_what_is_loaded, log_to
from tests.harness.servers import PostgresServer
from tests.harness.stores import postgres_store
from tests.harness.waiting import LONG_S, until

MIGRATIONS = Path(__file__).parents[4] / "migrations"


@pytest.fixture
def connection(empty_url: str) -> Iterator[Connection]:
    """Yield an empty database."""
    engine = create_engine(driver(empty_url))
    with engine.begin() as opened:
        yield opened
    engine.dispose()


def config(connection: Connection | None = None) -> Config:
    values = Config()
    values.set_main_option("script_location", str(MIGRATIONS))
    if connection is not None:
        values.attributes["connection"] = connection
    return values


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {"alembic_version"}


def drift(connection: Connection) -> list[object]:
    context = MigrationContext.configure(
        connection, opts={"compare_type": True, "compare_server_default": True}
    )
    return compare_metadata(context, Base.metadata)


def test_the_migrations_make_the_tables_of_the_models_and_each_can_be_undone(connection: Connection) -> None:
    for revision in list(ScriptDirectory.from_config(config()).walk_revisions())[::-1]:
        command.upgrade(config(connection), revision.revision)
        before = tables(connection)
        command.downgrade(config(connection), "-1")
        command.upgrade(config(connection), revision.revision)
        assert tables(connection) == before
    command.upgrade(config(connection), "head")  # a second time changes nothing
    assert tables(connection) == set(Base.metadata.tables)
    assert drift(connection) == []
    command.downgrade(config(connection), "base")
    assert tables(connection) == set()


def test_a_model_without_a_migration_would_be_noticed(connection: Connection) -> None:
    assert drift(connection) != []


def former(connection: Connection, model: str) -> dict[str, list[dict[str, Any]]]:
    """Fill a store of revision 0001, as it was written when a gateway had one model; return its rows."""
    rows: dict[str, list[dict[str, Any]]] = {
        "episodes": [
            {
                "id": f"ep-{i}", "key_hash": f"hash-{i}", "task_id": "t", "group_id": "g", "mode": "train", "model": model,
                "details": '{"a": 1}', "version": i, "state": "closed", "reason": "rewarded", "reward": 0.5,
                "components": None, "created_at": float(i), "closed_at": 9.0,
            }
            for i in range(2)
        ],
        "calls": [
            {
                "id": f"call-{i}", "episode_id": f"ep-{i}", "node": 1, "api": "chat", "stream": True, "asked": "{}",
                "used": "{}", "logprobs_mode": "processed_logprobs", "engine": "engine-0", "finish_reason": "stop",
                "prompt_tokens": 2, "completion_tokens": 1, "pauses": 0, "digest": b"d", "received_at": 1.0,
                "first_token_s": None, "seconds": 0.1,
            }
            for i in range(2)
        ],
        "nodes": [
            {
                "episode_id": f"ep-{i}", "index": j, "parent": j - 1, "at": 1, "sampled": bool(j), "ids": b"\1\0\0\0",
                "logprobs": b"\0\0\0\0", "spans": "[[0, 1]]", "flags": b"\0", "temperature": 1.0, "mask_reason": "",
                "call_id": f"call-{i}" if j else "",
            }
            for i in range(2) for j in range(2)
        ],
        "ledger_events": [
            {"seq": seq, "at": 1.0, "event": f'{{"type": "E{seq}"}}', "commands": "[]"} for seq in (1, 2, 3)
        ],
        "leases": [
            {
                "fence": fence, "id": f"lease-{fence}", "buffer": 0, "consumer": "trainer", "state": "acked",
                "checkpoint": "c", "reason": "", "created_at": 1.0,
            }
            for fence in (1, 2)
        ],
        "versions": [
            {"version": v, "parent": v - 1 if v else None, "path": f"v{v}", "state": "live", "report": "[]", "created_at": 1.0}
            for v in range(3)
        ],
    }  # fmt: skip
    for table, values in rows.items():
        names = list(values[0])
        columns, places = ", ".join(f'"{n}"' for n in names), ", ".join(f":{n}" for n in names)
        connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({places})"), values)
    return rows


def stored(connection: Connection, table: str) -> list[dict[str, Any]]:
    """Every row, in the order of its key."""
    keys = ", ".join(
        f'"{name}"' for name in inspect(connection).get_pk_constraint(table)["constrained_columns"]
    )
    return [
        dict(row) for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY {keys}")).mappings()
    ]


@pytest.mark.parametrize("model", ["sums", ""])
def test_a_store_of_one_model_goes_on_under_that_models_name_and_back(
    connection: Connection, model: str
) -> None:
    command.upgrade(config(connection), "0001")
    rows = former(connection, model)
    before = {table: stored(connection, table) for table in rows}
    command.upgrade(config(connection), "0002")
    for table, values in before.items():
        after = [{"model": model, **row} for row in values]
        if table == "calls":
            after = [{**row, "request_key": ""} for row in after]
        assert stored(connection, table) == after, table
    assert stored(connection, "exchanges") == []
    command.upgrade(config(connection), "head")
    if model:
        add_another_model(connection)
    command.downgrade(config(connection), "0001")
    assert {table: stored(connection, table) for table in rows} == before
    assert "exchanges" not in tables(connection)


def test_a_model_that_was_renamed_keeps_its_versions_and_its_trees(connection: Connection) -> None:
    command.upgrade(config(connection), "0001")
    rows = former(connection, "sums")
    connection.execute(text("UPDATE episodes SET model = 'former' WHERE id = 'ep-0'"))
    before = {table: stored(connection, table) for table in rows}
    command.upgrade(config(connection), "0002")
    assert [row["model"] for row in stored(connection, "nodes")] == ["former"] * 2 + ["sums"] * 2
    assert [row["model"] for row in stored(connection, "calls")] == ["former", "sums"]
    for table in ("ledger_events", "leases", "versions"):
        assert {row["model"] for row in stored(connection, table)} == {"sums"}
    command.downgrade(config(connection), "0001")
    assert {table: stored(connection, table) for table in rows} == before


def add_another_model(connection: Connection) -> None:
    """Add the rows of another model, with numbers that the first model used too."""
    call = {**stored(connection, "calls")[0], "id": "call-other", "model": "judge", "node": 0}
    node = {**stored(connection, "nodes")[0], "model": "judge", "call_id": "call-other"}
    lease = {**stored(connection, "leases")[0], "id": "lease-other", "model": "planner"}
    version = {**stored(connection, "versions")[0], "model": "planner"}
    event = {**stored(connection, "ledger_events")[0], "seq": 9, "model": "planner"}
    exchange = {"call_id": "call-other", "request": "{}", "status": 200, "response": ""}
    added = {"calls": call, "nodes": node, "leases": lease, "versions": version, "ledger_events": event}
    for table, values in {**added, "exchanges": exchange}.items():
        columns, places = ", ".join(f'"{n}"' for n in values), ", ".join(f":{n}" for n in values)
        written = {n: json.dumps(v) if isinstance(v, dict | list) else v for n, v in values.items()}
        connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({places})"), written)


async def test_a_store_of_one_model_is_read_by_the_gateway_of_today(empty_url: str) -> None:
    engine = create_engine(driver(empty_url))
    with engine.begin() as connection:
        command.upgrade(config(connection), "0001")
        former(connection, "sums")
    engine.dispose()
    database = await Database.open(StoreSettings(url=empty_url))
    try:
        nodes = await database.read(lambda c: turns.nodes(c, "sums", ["ep-0", "ep-1"]))
        assert [[node.sampled for node in nodes[e]] for e in ("ep-0", "ep-1")] == [[False, True]] * 2
        assert [c["id"] for c in await database.read(lambda c: turns.calls(c, "ep-1", "sums"))] == ["call-1"]
        events = await database.read(lambda c: ledger.events(c, "sums"))
        assert [event["type"] for event in events] == ["E1", "E2", "E3"]
        assert await database.read(lambda c: ledger.newest_fence(c, "sums")) == 2
        assert await database.read(lambda c: ledger.parents(c, "sums", "live")) == {0: None, 1: 0, 2: 1}
        assert await database.read(lambda c: ledger.newest_fence(c, "another")) == 0
    finally:
        await database.close()


def test_reasons_come_to_a_store_that_had_none_and_go_again(connection: Connection) -> None:
    command.upgrade(config(connection), "0001")
    former(connection, "sums")
    command.upgrade(config(connection), "0002")
    before = {
        table: stored(connection, table) for table in ("episodes", "calls", "nodes", "leases", "versions")
    }
    command.upgrade(config(connection), "0003")
    assert stored(connection, "leases") == [
        {**row, "deadline": row["created_at"]} for row in before["leases"]
    ]
    assert stored(connection, "calls") == [{**row, "reward": None} for row in before["calls"]]
    for table in ("episodes", "nodes", "versions"):
        assert stored(connection, table) == before[table], table
    connection.execute(text("UPDATE calls SET reward = 0.5 WHERE id = 'call-1'"))
    command.downgrade(config(connection), "0002")
    assert {table: stored(connection, table) for table in before} == before
    assert "decisions" not in tables(connection)


def test_batches_get_their_name_in_columns_and_events(connection: Connection) -> None:
    """A client's word and the size of a batch keep theirs; a downgrade restores every row."""
    command.upgrade(config(connection), "0022")
    events = [
        '{"type":"Settings","batch":2}', '{"type":"Consume","buffer":1}', '{"type":"Join","group_id":"\\"buffer\\":"}'
    ]  # fmt: skip
    commands = (
        '[{"type":"Late","group_id":"g","from_buffer":0,"to_buffer":1},{"type":"BufferReady","buffer":1}]'
    )
    for seq, event in enumerate(events):
        values = {"seq": seq + 1, "event": event, "commands": commands}
        connection.execute(
            text("INSERT INTO ledger_events VALUES (:seq, 1.0, :event, :commands, 'm')"), values
        )
    for kind in ("batch.leased", "episode.opened"):
        row = {"kind": kind, "data": '{"buffer":1}'}
        connection.execute(
            text(
                "INSERT INTO events (at, kind, model, episode_id, group_id, data) VALUES (1, :kind, 'm', '', '', :data)"
            ),
            row,
        )
    before = {table: stored(connection, table) for table in ("ledger_events", "events")}
    command.upgrade(config(connection), "0023")
    read = connection.dialect.name == "sqlite"
    found, reported = (
        [
            {name: json.loads(value) if read and name in ("event", "commands", "data") else value for name, value in row.items()}
            for row in stored(connection, table)
        ]
        for table in before
    )  # fmt: skip
    assert [row["event"] for row in found] == [
        json.loads(e.replace('"buffer":1', '"batch":1')) for e in events
    ]
    assert found[0]["commands"] == [
        {"type": "OverBound", "group_id": "g", "from_batch": 0, "to_batch": 1},
        {"type": "BatchReady", "batch": 1},
    ]
    assert [row["data"] for row in reported] == [{"batch": 1}, {"buffer": 1}]
    command.downgrade(config(connection), "0022")
    assert {table: stored(connection, table) for table in before} == before


async def test_a_lease_of_an_older_build_is_over(empty_url: str) -> None:
    """Its deadline is unknown after a restart: the next consumer gets the batch."""
    engine = create_engine(driver(empty_url))
    with engine.begin() as connection:
        command.upgrade(config(connection), "0001")
        former(connection, "sums")
        connection.execute(text("UPDATE leases SET state = 'held' WHERE fence = 2"))
        connection.execute(text("DELETE FROM ledger_events"))
    engine.dispose()
    database = await Database.open(StoreSettings(url=empty_url))
    try:
        bound = StalenessSettings()
        stored_ledger = await StoredLedger.load(database, bound, "sums")
        leases = await Leases.load(database, stored_ledger, FeedSettings(), GroupReader("sums", bound))
        assert (await leases.lease("another")).fence == 3
    finally:
        await database.close()


# Several processes, of several builds


def test_text_is_ordered_by_its_code_points_in_every_column(postgres: PostgresServer) -> None:
    other = postgres.execute(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' AND data_type IN"
        " ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C' AND table_name <> 'alembic_version'",
        postgres_store(postgres).rpartition("/")[2],
    )
    assert other == []


def _bring_up_to_date(url: str, log: Path) -> None:
    keep_what_is_loaded()
    log_to(log)
    schema.bring_up_to_date(connect(url, 1), StoreSettings(url=url))


async def test_processes_that_start_together_migrate_once(postgres: PostgresServer, tmp_path: Path) -> None:
    """Without the lock, all but one would fail at the first table."""
    name = postgres.new_database()
    url = postgres.url(name)
    starting = [
        forks().Process(target=_bring_up_to_date, args=(url, tmp_path / "log"), daemon=True) for _ in range(2)
    ]
    with psycopg.connect(url) as held:  # all of them wait at the first step, so that they meet there
        held.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        for process in starting:
            process.start()
        waits = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'headgate'"
        await until(lambda: postgres.execute(waits) == [(2,)], "both wait at the first step")
        held.rollback()
    for process in starting:
        await asyncio.to_thread(process.join, LONG_S)
        assert process.exitcode == 0, (tmp_path / "log").read_text()
    database = await Database.open(StoreSettings(url=url))
    await database.submit(lambda c: ledger.insert_event(c, "m", {}, []))
    await database.close()


async def of_a_newer_build(database: Database, oldest: str) -> None:
    """Change the tables as a newer build does, of which older ones down to `oldest` can work on them."""
    for statement in (
        "UPDATE alembic_version SET version_num = '9999'",
        f"UPDATE compatibility SET oldest = '{oldest}'",
        "ALTER TABLE episodes ADD COLUMN mood VARCHAR",
    ):
        await database.submit(lambda c, s=statement: c.execute(text(s)) and None)


async def test_tables_of_a_newer_build_that_only_added_to_them_are_used(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer = await Database.open(StoreSettings(url=store_url))
    await of_a_newer_build(newer, "0006")
    older = await Database.open(StoreSettings(url=store_url))
    assert "tables of a newer build" in caplog.text
    await older.submit(lambda c: ledger.insert_event(c, "m", {}, []))
    assert await newer.read(lambda c: ledger.events(c, "m")) == [{}]
    assert schema.revision(StoreSettings(url=store_url)) == "9999"
    for database in (newer, older):
        await database.close()


async def test_tables_of_a_newer_build_that_changed_them_are_refused(store_url: str) -> None:
    database = await Database.open(StoreSettings(url=store_url))
    await of_a_newer_build(database, "9000")
    await database.submit(lambda c: ledger.insert_event(c, "m", {}, []))  # one that runs goes on
    with pytest.raises(
        ConfigError, match=r"newer than this build: its tables are of revision '9999'.*'9000' at least"
    ):
        await Database.open(StoreSettings(url=store_url))
    assert await database.read(lambda c: ledger.events(c, "m")) == [{}]
    await database.close()


async def test_the_command_goes_back_and_forth_and_never_under_a_running_gateway(
    store_url: str, tmp_path: Path
) -> None:
    database = await Database.open(StoreSettings(url=store_url))
    await database.submit(lambda c: coordination.claim(c, "gateway-1", "http://g", 60.0, None) and None)
    (config_file := tmp_path / "gateway.toml").write_text(
        f'[models.m]\npath = "."\n[engine]\nlaunch = "fake"\n[store]\nurl = "{store_url}"\n'
    )

    def run(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["migrate", "-c", str(config_file), *options])
        return done.exit_code, done.output

    newest = schema.newest_revision()
    assert run("--check") == (0, f"tables: {newest}; this build: {newest}\n")
    assert run("--to", "0012", "--yes") == (2, "a gateway process (gateway-1) runs on this database: stop all of them"
                                            " before you go back to older tables\n")  # fmt: skip
    await database.submit(lambda c: coordination.resign(c, 1))
    await database.close()
    assert run("--to", "0012")[0] == 1, "without a confirmation"
    assert run("--to", "0012", "--yes") == (0, "tables: 0012\n")
    assert run("--check") == (1, f"tables: 0012; this build: {newest}\n")
    assert run("--to", "12")[0] == 2
    assert run() == (0, f"tables: {newest}\n")


async def test_a_database_of_another_encoding_is_refused(postgres: PostgresServer) -> None:
    postgres.execute(
        "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' LOCALE_PROVIDER libc TEMPLATE template0"
    )
    with pytest.raises(ConfigError, match="encoding is LATIN1; it must be UTF8"):
        await Database.open(StoreSettings(url=postgres.url("latin")))


async def test_a_migration_waits_for_a_table_in_use_no_longer_than_running_processes_can_bear(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The migration gives up, so that statements queued behind it proceed, and is tried again."""
    name = postgres.new_database()
    engine = create_engine(driver(postgres.url(name)))
    with engine.begin() as connection:
        command.upgrade(config(connection), "0005")
    monkeypatch.setattr(schema, "_LOCK_WAIT_S", 0.0)
    holder = engine.connect()
    holder.execute(text("SELECT * FROM episodes"))
    with pytest.raises(ConfigError, match="others hold locks on them"):
        await Database.open(StoreSettings(url=postgres.url(name)))
    holder.close()
    monkeypatch.undo()
    await (await Database.open(StoreSettings(url=postgres.url(name)))).close()
    engine.dispose()


Columns = dict[str, dict[str, tuple[str, bool, bool]]]


def columns(connection: Connection) -> Columns:
    """Return the columns of every table: type, nullability and default."""
    found = inspect(connection)
    return {
        table: {
            column["name"]: (str(column["type"]), column["nullable"], column["default"] is not None)
            for column in found.get_columns(table)
        }
        for table in tables(connection)
    }


def broken(before: Columns, after: Columns) -> list[str]:
    """Change that break a process which knows only the old tables."""
    gone = [
        f"{table}.{name} was changed or dropped"
        for table, known in before.items()
        for name, kind in known.items()
        if after.get(table, {}).get(name) != kind
    ]
    needed = [
        f"{table}.{name} is needed and not known"
        for table in before
        for name, (_, nullable, default) in after.get(table, {}).items()
        if name not in before[table] and not nullable and not default
    ]
    return gone + needed


def test_running_processes_of_the_build_before_can_go_on(connection: Connection) -> None:
    """From the oldest build on that works on the newest tables; what its own migration drops, no other may."""
    command.upgrade(config(connection), schema.OLDEST_BUILD)
    before = columns(connection)
    for revision in list(ScriptDirectory.from_config(config()).walk_revisions(schema.OLDEST_BUILD, "head"))[
        ::-1
    ]:
        command.upgrade(config(connection), revision.revision)
        after = columns(connection)
        assert broken(before, after) == [], revision.revision
        before = after


def test_a_migration_that_breaks_running_processes_would_be_noticed(connection: Connection) -> None:
    command.upgrade(config(connection), "head")
    before = columns(connection)
    connection.execute(text("ALTER TABLE episodes DROP COLUMN notice"))
    connection.execute(text("ALTER TABLE calls ADD COLUMN free INTEGER"))
    connection.execute(text("ALTER TABLE writers RENAME COLUMN at TO since"))
    assert broken(before, columns(connection)) == [
        problem
        for table in before
        for problem in {
            "episodes": ["episodes.notice was changed or dropped"],
            "writers": ["writers.at was changed or dropped"],
        }.get(table, [])
    ] + ["writers.since is needed and not known"]
