"""Spans of calls, as a collector gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.extras import install_command
from headgate.processes.ports import free_port
from tests.harness.collector import Collector, facts
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.scripted import scripted_gateway

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STEPS = {"placement wait", "engine request", "commit"}


@pytest.fixture
async def collected() -> AsyncIterator[tuple[Collector, dict[str, Any]]]:
    """A collector, and the settings that send to it."""
    collector, port = Collector(), free_port()
    async with serve(collector.app(), port):
        yield (collector, {"endpoint": f"http://127.0.0.1:{port}", "service": "my-agents"})


async def call(gateway: RunningGateway, sampled: bool = True, **body: Any) -> str:
    """One call of an agent that traces itself; its episode."""
    episode, headers = await gateway.open(mode="eval")
    parent = f"00-{TRACE}-{PARENT}-{'01' if sampled else '00'}"
    response = await gateway.chat({**headers, "traceparent": parent}, **body)
    assert response.status_code == 200, response.text
    return episode


async def test_a_call_and_its_steps_are_spans_of_the_agents_trace(
    tiny_model: Path, tmp_path: Path, collected: tuple[Collector, dict[str, Any]]
) -> None:
    collector, telemetry = collected
    async with scripted_gateway(tiny_model, tmp_path, telemetry=telemetry) as (gateway, engine):
        engine.replies.append("hello")
        episode = await call(gateway, stream=True, max_tokens=40, temperature=0.5)
    chat = collector.one("chat demo")
    assert {span.name for span in collector.spans} == {"chat demo"} | STEPS
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert chat.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in collector.spans if span is not chat} == {chat.span_id}
    attributes = facts(chat)
    tokens = len(engine.encode("hello")) + 1
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headgate",
        "gen_ai.request.model": "demo",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": episode,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.output_tokens": tokens,
        "headgate.versions": [0],
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert attributes["gen_ai.usage.input_tokens"] == len(engine.requests[0]["token_ids"])
    first = attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first <= (chat.end_time_unix_nano - chat.start_time_unix_nano) / 1e9
    assert facts(collector.one("engine request"))["headgate.engine"] == "demo-0"
    assert collector.resources[0]["service.name"] == "my-agents"
    assert not any("hello" in str(facts(span)) for span in collector.spans)  # no text leaves


async def test_a_failed_engine_is_a_failed_span_and_the_next_attempt_another(
    tiny_model: Path, tmp_path: Path, collected: tuple[Collector, dict[str, Any]]
) -> None:
    collector, telemetry = collected
    values = settings_for(tiny_model, tmp_path, telemetry=telemetry)
    async with run_gateway(values) as gateway:
        await gateway.fake("faults", fail_after=4)
        await call(gateway, stream=True, max_tokens=6)
    attempts = [span for span in collector.spans if span.name == "engine request"]
    failed = [facts(span)["error.type"] for span in attempts if span.status.code == 2]
    assert failed == ["EngineError"]
    assert attempts[-1].status.code != 2
    assert collector.one("chat demo").status.code != 2  # the agent got its reply


async def test_the_agent_decides_whether_its_call_is_traced_and_share_where_it_does_not(
    tiny_model: Path, tmp_path: Path, collected: tuple[Collector, dict[str, Any]]
) -> None:
    collector, telemetry = collected
    values = settings_for(tiny_model, tmp_path, telemetry={**telemetry, "share": 0.0})
    async with run_gateway(values) as gateway:
        await call(gateway, sampled=False, max_tokens=2)
        _, headers = await gateway.open(mode="eval")
        await gateway.chat(headers, max_tokens=2)
        assert collector.spans == []
        await call(gateway, sampled=True, max_tokens=2)
    assert len({span.trace_id for span in collector.spans}) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_without_its_collector_calls_are_served_and_the_gateway_ends(
    tiny_model: Path, tmp_path: Path
) -> None:
    away = {"endpoint": f"http://127.0.0.1:{free_port()}"}
    async with run_gateway(settings_for(tiny_model, tmp_path, telemetry=away)) as gateway:
        await call(gateway, max_tokens=2)


def test_without_the_sdk_an_endpoint_names_the_extra(tiny_model: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk"] = None
from gateway.config import TelemetrySettings
from gateway.telemetry.opening import open_tracing
open_tracing(TelemetrySettings(), "p")
open_tracing(TelemetrySettings(endpoint="http://127.0.0.1:4318"), "p")
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert install_command("otel") in ended.stderr.splitlines()[-1]
