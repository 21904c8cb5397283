"""Codex's default requests (a recorded one, trimmed), and the responses that it can read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness.agents import client_of
from tests.harness.responses import EVENT, Scripted, one_path
from tests.harness.scripted import scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECORDED = Path(__file__).parent / "recorded" / "codex.json"
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}


@pytest.fixture(scope="module")
async def scripted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    models = {"demo": {"path": str(tiny_model), "max_model_len": 16_384}}
    async with scripted_gateway(tiny_model, tmp_path_factory.mktemp("codex"), models=models) as both:
        yield both


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def request(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """The events of a response, each as the SDK types it, and the response's headers."""
    metadata = {"client_metadata": body["client_metadata"]}
    known = {name: value for name, value in body.items() if name not in metadata}
    raw = await client.responses.with_raw_response.create(**known, extra_body=metadata)
    events = [event async for event in raw.parse()]
    for event in events:
        EVENT.validate_python(event.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return events, dict(raw.headers)


async def test_a_session(scripted: Scripted) -> None:
    """Calls of tools in a namespace, of a custom tool and of a function; Codex sends every item back as it got it."""
    gateway, engine = scripted
    body = json.loads(RECORDED.read_text())
    body["tools"].insert(1, PATCH)
    engine.replies += [
        call("multi_agent_v1.close_agent", target="a"),
        call("apply_patch", input="*** Begin Patch\n+é\n"),
        call("exec_command", cmd="ls"),
        "Done.",
    ]
    sent = []
    async with client_of(gateway) as (client, episode):
        for outputs in ("function_call_output", "custom_tool_call_output", "function_call_output", ""):
            events, headers = await request(client, body)
            assert headers["x-headgate-dropped-tools"] == "web_search"
            items = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
            sent += [(event.type, event.to_dict()) for event in events]
            body["input"] += items
            if outputs:
                body["input"].append({"type": outputs, "call_id": items[-1]["call_id"], "output": "ok"})
        await one_path(gateway, episode, 4)
        recorded = await gateway.admin.episode(episode)
    calls = [item for item in body["input"] if "call_id" in item and "name" in item]
    assert [(item["type"], item["name"], item.get("namespace")) for item in calls] == [
        ("function_call", "close_agent", "multi_agent_v1"),
        ("custom_tool_call", "apply_patch", None),
        ("function_call", "exec_command", None),
    ]
    assert calls[1]["input"] == "*** Begin Patch\n+é\n"
    custom = [event for kind, event in sent if kind.startswith("response.custom_tool_call_input")]
    assert [event["type"].rpartition(".")[2] for event in custom] == ["delta", "done"]
    assert custom[0]["delta"] == custom[1]["input"] == calls[1]["input"]
    assert [kept["requested"]["client_metadata"] for kept in recorded["calls"]] == [
        body["client_metadata"]
    ] * 4


async def test_dropped_tools_are_counted(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies.append("Hello.")

    async def counted() -> float:
        lines = (await gateway.http.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith('headgate_dropped_tools_total{type="mcp"}')]
        return float(found[0].split()[-1]) if found else 0.0

    before = await counted()
    async with client_of(gateway) as (client, _):
        response = await client.responses.create(model="m", input="hi", tools=[{"type": "mcp"}])  # type: ignore[call-overload]
    assert response.tools == []
    assert await counted() == before + 1


async def test_hosted_tools_are_refused_by_setting(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        scripted_gateway(tiny_model, tmp_path, server={"hosted_tools": "refuse"}) as (gateway, _),
        client_of(gateway) as (client, _),
    ):
        with pytest.raises(openai.BadRequestError, match="hosted_tools") as refused:
            await client.responses.create(model="m", input="hi", tools=[{"type": "web_search"}])
        assert refused.value.param == "tools.0"
