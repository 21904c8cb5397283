"""`gateway doctor` finds what is wrong with what a configuration names, and reports it before a gateway starts with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from gateway.config import EngineSettings
from gateway.config.settings import Settings
from gateway.doctor import machine
from gateway.doctor.engines import examine_arguments, examine_response
from gateway.engines.base import Engine, GenerateRequest, TokenChunk
from gateway.engines.fake import FakeEngine, create_fake_app
from gateway.store.connections import connect
from headgate.processes.ports import free_port
from tests.families.family import named, save
from tests.harness.expiry import patient_bus
from tests.harness.gateway_command import gateway_command, write_toml
from tests.harness.gateways import serve, settings_for
from tests.harness.servers import RedisServer
from tests.harness.stores import make_tables


async def findings(values: dict[str, Any], work: Path) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """The exit status, and the level and text of every finding by its part."""
    result = await gateway_command("doctor", write_toml(values, work / "doctor.toml"), "--json")
    found = json.loads(result.output)
    assert all(bool(one["fix"]) == (one["level"] != "ok") for ones in found.values() for one in ones)
    return result.exit_code, {
        part: [(one["level"], one["what"]) for one in ones] for part, ones in found.items()
    }


async def test_a_configuration_that_works_has_no_problem(
    tiny_model: Path, tmp_path: Path, redis: RedisServer
) -> None:
    values = settings_for(tiny_model, tmp_path, bus=patient_bus(redis))
    make_tables(values["store"]["url"])
    engine, port = FakeEngine("none"), free_port()
    async with serve(create_fake_app(engine), port):
        values["engine"] = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
        status, found = await findings(values, tmp_path)
    assert status == 0
    assert {level for ones in found.values() for level, _ in ones} == {"ok"}, found
    assert found["bus"] == [("ok", "Redis responds")]


async def test_what_is_wrong_is_named(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(
        tmp_path, tmp_path, bus={"url": f"redis://127.0.0.1:{free_port()}"}
    )  # no checkpoint's folder
    values["engine"] = {"launch": "external", "url": f"http://127.0.0.1:{free_port()}"}
    make_tables(values["store"]["url"])
    database = connect(values["store"]["url"], 1)
    with database.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    database.dispose()
    status, found = await findings(values, tmp_path)
    assert status == 1
    for part, text in (
        ("checkpoints and templates", "this folder has no tokenizer.json"),
        ("engines", "does not respond"),
        ("database", "the tables of revision 0001"),
        ("bus", "the bus cannot be reached"),
    ):
        ((level, what),) = found[part]
        assert (level, text in what) == ("problem", True), what


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [(103.0, ""), (98.0, "-2.0 s from this machine's"), (107.5, "+2.5 s from this machine's")],
)
async def test_only_a_clock_that_is_ahead_or_behind_however_slow_the_response_is_reported(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: float, reason: str
) -> None:
    """This machine's clock shows 100 when the database is queried, and 105 when it has responded."""
    settings = Settings.parse(settings_for(tiny_model, tmp_path))
    make_tables(settings.store.url)
    times = iter([100.0, *[105.0] * 9])
    monkeypatch.setattr(machine, "time", SimpleNamespace(time=lambda: next(times)))
    monkeypatch.setattr(machine.clock, "now", lambda _connection: theirs)
    _, *warnings = await machine.examine_database(settings)
    assert [reason in one.what for one in warnings] == ([True] if reason else [])


class Scorer:
    """An engine in bf16 that samples the same token again and again; at another temperature than 1 it reports log-probabilities
    times a factor. What it reports and what it scores are apart by rounding."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        count = request.sampling.max_tokens
        factor = self._factor if request.sampling.temperature != 1 else 1.0
        yield TokenChunk([7] * count, [-0.5 * factor - 0.01] * count, "length")

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        return [-0.5] * (len(ids) - 1)


@pytest.mark.parametrize(("factor", "level"), [(2.0, "ok"), (1.0, "problem")])
async def test_a_vllm_whose_log_probabilities_ignore_the_temperature_is_found(
    factor: float, level: str
) -> None:
    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": "0.31.1"})

    app = web.Application()
    app.router.add_get("/version", version)
    async with TestServer(app) as server:
        release, found = await examine_response(cast(Engine, Scorer(factor)), str(server.make_url("")), "it")
    assert (release.level, found.level) == ("warning", level)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--logprobs-mode", "raw_logprobs"], "is not processed_logprobs"),
        (["--generation-config=auto"], "is not vllm"),
        (["--enforce-eager", "--max-model-len", "512"], "--max-model-len itself"),
        (["--logprobs-mode", "processed_logprobs", "--enforce-eager"], ""),
    ],
)
def test_arguments_that_undo_what_the_gateway_needs_of_vllm_are_found(args: list[str], reason: str) -> None:
    found = examine_arguments(EngineSettings(args=tuple(args)))
    assert [(one.level, reason in one.what) for one in found] == ([("problem", True)] if reason else [])


async def test_an_engine_with_a_shorter_context_than_the_gateway_counts_on_is_found(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def models(_request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m", "max_model_len": 512}]})

    rest = Mount("/", create_fake_app(FakeEngine("none")))
    fake, port = Starlette(routes=[Route("/v1/models", models), rest]), free_port()
    values = settings_for(tiny_model, tmp_path)
    async with serve(fake, port):
        values["engine"] = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
        status, found = await findings(values, tmp_path)
    assert status == 1
    assert ("problem", True) in [
        (level, "takes 512 tokens, and [models.demo]" in what) for level, what in found["engines"]
    ]


@pytest.mark.parametrize(
    ("saved", "family", "level", "reason"),
    [
        ("deepseek r1", "deepseek-v3", "warning", "otherwise than the checkpoint's own chat template"),
        ("llama3", "qwen3", "problem", "cannot be"),
        ("phi3", "template", "warning", "no marks of tool calls"),
    ],
)
async def test_a_family_that_is_not_the_models_is_found(
    tmp_path: Path, saved: str, family: str, level: str, reason: str
) -> None:
    save(named(saved), tmp_path / "model")
    values = settings_for(tmp_path / "model", tmp_path, models={"demo": {"family": family}})
    values["models"]["demo"]["path"] = str(tmp_path / "model")
    _, found = await findings(values, tmp_path)
    assert (level, True) in [(one, reason in what) for one, what in found["checkpoints and templates"]]
