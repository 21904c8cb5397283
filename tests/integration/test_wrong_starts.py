"""A start that cannot be: one sentence that names the setting and the way out, exit status 2, no trace; by the real command."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness.forks import gateway_command
from tests.harness.gateway_command import served, write_toml
from tests.harness.gateways import settings_for
from tests.harness.servers import PostgresServer
from tests.harness.waiting import within

VLLM = {"launch": "vllm", "python": sys.executable}


def of_model(**changed: Any) -> dict[str, Any]:
    return {"models": {"m": {"path": "empty", "family": "qwen3", **changed}}}


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"engine": VLLM | {"python": "/nowhere/python"}}, ("[engine] python", "no such program", "fake")),
        ({"engine": VLLM}, ("[engine] python", "has no vLLM", "environment")),
        (of_model(), ("[models.m] path", "no tokenizer.json", "folder of a checkpoint")),
        (of_model(family="qwen9"), ("models.m.family", "'qwen9' is not known", "'qwen3'")),
        ({"store": {"url": "mysql://u:secret@h/d"}}, ("store.url", "mysql://", "postgresql://")),
        ({"store": {"url": "somewhere"}}, ("store.url", "sqlite:///")),
        ({"store": {"url": "sqlite:////proc/no/store.db"}}, ("[store] url", "/proc/no", "written")),
        ({"store": {"url": "sqlite:///gateway.toml"}}, ("[store] url", "not a database", "own")),
        ({"store": {"url": "sqlite:///empty"}}, ("[store] url", "unable to open")),
        ({"control": {"recording": "/proc/no/r"}}, ("[control] recording", "/proc/no/r", "another file")),
    ],
    ids=[
        "python",
        "vllm",
        "model",
        "family",
        "mysql",
        "no url",
        "no folder",
        "no database",
        "a folder",
        "recording",
    ],
)
def test_a_wrong_setting_is_reported_in_one_sentence(
    tiny_model: Path, tmp_path: Path, changed: dict[str, Any], parts: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    config = write_toml(settings_for(tiny_model, tmp_path, **changed), tmp_path / "gateway.toml")
    status, log = gateway_command("serve", "--config", str(config), folder=tmp_path)
    assert status == 2, log
    lines = log.strip().splitlines()
    of_file = lines[0].endswith("gateway.toml:")  # then each mistake of the file has a line
    assert len([line for line in lines if " ERROR " not in line]) == 1 + of_file, log
    for words in parts:
        assert words in lines[-1]
    assert "secret" not in log and "Traceback" not in log


def test_a_refused_login_is_reported_immediately(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Trying again is of no use: the server is there."""
    url = postgres.url("no-such-database")
    values = settings_for(tiny_model, tmp_path, store={"url": url, "read_wait_s": 3600})
    config = write_toml(values, tmp_path / "gateway.toml")
    status, log = gateway_command("serve", "--config", str(config), folder=tmp_path)
    assert status == 2, log
    (line,) = log.strip().splitlines()
    assert line.startswith("[store] url = ") and "does not exist" in line


async def test_the_folder_of_a_store_is_made(tiny_model: Path, tmp_path: Path) -> None:
    """Like that of every file that the gateway writes: a first start needs no other command."""
    folder = tmp_path / "not" / "there"
    values = settings_for(tiny_model, tmp_path, store={"url": f"sqlite:///{folder}/store.db"})
    async with served(values, tmp_path) as gateway:
        async with within("the gateway is ready"):
            await gateway.ready()
        assert (folder / "store.db").is_file()


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "somewhere", "postgresql://u:secret@h:port/d"])
@pytest.mark.parametrize("command", [["prune", "--older-than", "1"], ["export", "--out", "x.parquet"]])
def test_every_command_knows_which_databases_there_are(
    tiny_model: Path, tmp_path: Path, command: list[str], url: str
) -> None:
    config = write_toml(settings_for(tiny_model, tmp_path, store={"url": url}), tmp_path / "gateway.toml")
    result = CliRunner().invoke(app, [*command, "--config", str(config)])
    assert result.exit_code == 2, result.output
    assert "store.url: " in result.output or result.output.startswith("[store] url")
    assert "secret" not in result.output


async def test_a_second_gateway_on_one_sqlite_file_is_refused_with_the_process_that_has_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It took the coordinator's role from the first one, which was silent until it was restarted."""
    values = settings_for(tiny_model, tmp_path)
    (second := tmp_path / "second").mkdir()
    other = write_toml(
        {**values, "server": {**values["server"], "port": free_port()}}, second / "gateway.toml"
    )
    async with served(values, tmp_path) as first:
        await first.ready()
        status, log = await asyncio.to_thread(gateway_command, "serve", "--config", str(other), folder=second)
        assert status == 2, log
        assert f"is used by the process {first.process.pid}" in log
        async with GatewayClient(first.url) as admin:
            assert (await admin.open_episode("t")).api_key
    async with served({**values, "server": {**values["server"], "port": free_port()}}, second) as again:
        await again.ready()
