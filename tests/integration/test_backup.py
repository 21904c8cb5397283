"""A backup of PostgreSQL and of the trainer's folder, restored into an empty place, on which training goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from examples.service.programs import find_program
from tests.harness.gateways import run_gateway, settings_for
from tests.harness.servers import PostgresServer
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of, train_one


def run(program: str, *arguments: str) -> None:
    """A program of the server's own version."""
    command = [find_program("postgres").resolve().with_name(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_restored_backup_is_trained_on(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> None:
    name, restored = postgres.new_database(), postgres.new_database()
    folder, backup = tmp_path / "run", tmp_path / "backup"
    overrides = {"staleness": {"batch": 1, "eta": 1, "min_members": 1}, "update": {"probe": False}}
    before = settings_for(tiny_model, tmp_path, store={"url": postgres.url(name)}, **overrides)
    async with run_gateway(before) as gateway:
        async with episodes(gateway), loop_of(gateway, settings_of(gateway, tiny_model, tmp_path)) as loop:
            await train_one(loop)
        run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", postgres.url(name))
        shutil.copytree(folder, backup)
        known = {e["episode_id"]: e["reward"] for e in await gateway.admin.episodes(limit=1000)}
    postgres.drop_database(name)
    shutil.rmtree(folder)

    run("pg_restore", f"--dbname={postgres.url(restored)}", str(tmp_path / "dump"))
    shutil.copytree(backup, folder)
    after = settings_for(tiny_model, tmp_path, store={"url": postgres.url(restored)}, **overrides)
    async with run_gateway(after) as gateway:
        assert {e["episode_id"]: e["reward"] for e in await gateway.admin.episodes(limit=1000)} == known
        async with episodes(gateway), loop_of(gateway, settings_of(gateway, tiny_model, tmp_path)) as loop:
            assert loop.trainer.version == 1
            await train_one(loop)
    live = postgres.execute("SELECT version FROM versions WHERE state = 'live' ORDER BY 1", restored)
    assert live == [(0,), (1,), (2,)]
    trained = postgres.execute(
        "SELECT group_id, count(*) FROM decisions WHERE kind = 'trained' GROUP BY 1", restored
    )
    assert len(trained) == 2 and {count for _, count in trained} == {1}, (
        "each batch has one group, trained once"
    )
