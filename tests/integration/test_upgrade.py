"""An upgrade keeps every episode: the gateway of today serves a store that a gateway of revision 0013 wrote."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from gateway.config import StoreSettings
from gateway.store.database import Database
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.weights import publish

DUMP = Path(__file__).parent / "store_0013.sql"
OWN = ("alembic_version", "sqlite_sequence")
TRAINED = ("ep-04fdbadfee18014ea097", "ep-e1ec1728250e7e487460")
OPEN = "ep-808453056450173f602c"


def rows(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table."""
    with closing(sqlite3.connect(store)) as connection:
        connection.row_factory = sqlite3.Row
        names = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        cursors = {name: connection.execute(f'SELECT * FROM "{name}"') for name in names if name not in OWN}
        return {name: [dict(row) for row in found] for name, found in cursors.items()}


def renamed(value: str) -> str:
    """Return stored JSON as revision 0023 changes it."""
    return value.replace('"buffer":', '"batch":').replace("BufferReady", "BatchReady")


async def test_a_store_of_0013_keeps_every_row_and_is_served(tiny_model: Path, tmp_path: Path) -> None:
    publish(tiny_model, tmp_path / "v1", 1, 0, None)
    store = tmp_path / "gateway.db"
    with closing(sqlite3.connect(store)) as connection:
        connection.executescript(DUMP.read_text().replace("@RUNS@", str(tmp_path)))
    before = rows(store)
    assert all(before.values()), "a table without rows shows nothing"
    await (await Database.open(StoreSettings(url=f"sqlite:///{store}"))).close()
    after = rows(store)
    dropped = {"api", "agent", "asked_model", "labels"}  # codespell:ignore asked
    before["answers"] = [
        {key: value for key, value in row.items() if key not in dropped}
        for row in before["answers"]
        if row["api"] == "responses"
    ]
    assert before["answers"], "stored responses stay (0020 drops stored chat completions)"
    for row in before["calls"]:
        row["requested"] = row.pop("asked")  # 0021 renames it
    for row in (*before["decisions"], *before["leases"]):
        row["batch"] = row.pop("buffer")  # so does 0023
    for table, columns in {"ledger_events": ("event", "commands"), "events": ("data",)}.items():
        for row in before[table]:
            row.update({column: renamed(row[column]) for column in columns})
    kept = {name: [{key: row[key] for key in before[name][0]} for row in after[name]] for name in before}
    assert kept == before

    values = settings_for(tiny_model, tmp_path, staleness={"batch": 1, "eta": 1, "min_members": 1})
    values["models"] = {"sums": {"path": str(tiny_model)}}
    async with run_gateway(values) as gateway:
        listed = await gateway.admin.episodes()
        assert {row["episode_id"]: row["reward"] for row in listed} == {
            row["id"]: row["reward"] for row in before["episodes"]
        }
        (group,) = await gateway.admin.batch_groups(0)
        assert sorted(episode.episode_id for episode in group.episodes) == sorted(TRAINED)
        for episode_id in TRAINED:
            nodes = (await gateway.admin.trajectory(episode_id))["nodes"]
            stored = [row for row in before["nodes"] if row["episode_id"] == episode_id]
            assert len(nodes) == len(stored) > 2
        await gateway.admin.reward(OPEN, 1.0)
        assert (await gateway.admin.episode(OPEN))["state"] == "closed"
