"""vLLM's adapter requests and reads the experts of tokens only where they are wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engines.base import GenerateRequest, TokenChunk
from gateway.engines.fake import FakeEngine, create_fake_app
from gateway.engines.vllm import VLLMEngine
from headgate.processes.ports import free_port
from headgate.types import Sampling
from tests.harness.gateways import serve

CONFIG = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}


async def last_chunk(engine: FakeEngine, routes_from: int | None) -> tuple[bool, TokenChunk]:
    """Return whether the engine reports experts, and the last chunk of a reply of four tokens to a prompt of three."""
    port = free_port()
    async with serve(create_fake_app(engine), port):
        adapter = VLLMEngine("e", f"http://127.0.0.1:{port}")
        request = GenerateRequest("r", [5, 6, 7], Sampling(max_tokens=4), routes_from=routes_from)
        chunks = [chunk async for chunk in adapter.generate(request)]
        reports = await adapter.returns_routes()
        await adapter.close()
    assert all(chunk.routes is None for chunk in chunks[:-1])
    return reports, chunks[-1]


@pytest.mark.parametrize(("routes_from", "shape"), [(0, (6, 3, 2)), (2, (4, 3, 2)), (None, None)])
async def test_the_last_chunk_has_the_experts_of_the_positions_that_are_wanted(
    routes_from: int | None, shape: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    reports, chunk = await last_chunk(FakeEngine(str(tmp_path), returns_routes=True), routes_from)
    assert reports
    assert (None if chunk.routes is None else chunk.routes.shape) == shape


async def test_an_engine_without_the_option_reports_none() -> None:
    reports, chunk = await last_chunk(FakeEngine("none"), 0)
    assert not reports
    assert chunk.routes is None


async def test_experts_that_cannot_be_read_are_a_report_of_no_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call goes on; its routes are counted as impossible (`TurnRoutes`)."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("gateway.engines.fake.requests.as_npy", lambda _: "bm8gYXJyYXk=")
    _, chunk = await last_chunk(FakeEngine(str(tmp_path), returns_routes=True), 0)
    assert isinstance(chunk.routes, np.ndarray)
    assert chunk.routes.ndim == 1
