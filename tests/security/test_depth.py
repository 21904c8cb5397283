"""JSON that is nested too deep, wherever it comes from: an error that names it, never a 500, and never a turn that is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.render.formats import TOOL_FORMS, ToolForm
from headgate.json_depth import MAX_DEPTH, MAX_SAMPLED_DEPTH
from tests.harness.gateways import RunningGateway
from tests.harness.records import nodes_of
from tests.harness.scripted import TOOLS, USER, ScriptedEngine, scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

Stage = tuple[RunningGateway, ScriptedEngine]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


TOO_DEEP = ["[" * 5000, nested(3000), nested(300), nested(MAX_DEPTH + 1)]
IDS = ["unclosed", "objects", "beyond orjson", "one too many"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    models = {"demo": {"path": str(tiny_model), "max_model_len": 2**16}}
    async with scripted_gateway(tiny_model, tmp_path_factory.mktemp("deep"), models=models) as made:
        yield made


def bodies(arguments: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Requests of each API with a call's arguments in their history, and how they are named."""
    function = {"name": "add", "arguments": arguments}
    chat = [
        USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    items = [
        USER,
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    return {
        "/v1/chat/completions": ({"messages": chat}, "messages.1.tool_calls.0.function.arguments"),
        "/v1/responses": ({"input": items}, "input.1.arguments"),
    }


@pytest.mark.parametrize("arguments", TOO_DEEP, ids=IDS)
async def test_a_calls_arguments_in_a_request_are_refused_by_name(stage: Stage, arguments: str) -> None:
    gateway, _ = stage
    _, headers = await gateway.open(mode="eval")
    for path, (body, name) in bodies(arguments).items():
        response = await gateway.http.post(path, json={"model": "m", **body}, headers=headers)
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("too_deep", name)


async def test_arguments_as_deep_as_a_body_may_be_are_read(stage: Stage) -> None:
    gateway, engine = stage
    _, headers = await gateway.open(mode="eval")
    for path, (body, _) in bodies(nested(MAX_DEPTH)).items():
        engine.replies.append("ok")
        response = await gateway.http.post(path, json={"model": "m", **body}, headers=headers)
        assert response.status_code == 200, (path, response.text)


@pytest.mark.parametrize("arguments", TOO_DEEP, ids=IDS)
async def test_a_sampled_call_that_is_too_deep_is_text_and_its_turn_is_recorded(
    stage: Stage, arguments: str
) -> None:
    gateway, engine = stage
    for stream in (False, True):
        episode, headers = await gateway.open(mode="eval")
        text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
        engine.replies.append(text)
        response = await gateway.chat(headers, tools=TOOLS, messages=[USER], stream=stream)
        assert response.status_code == 200, response.text
        if not stream:
            message = response.json()["choices"][0]["message"]
            assert "tool_calls" not in message
            assert message["content"] == text
        assert "data: [DONE]" in response.text or not stream
        turn = (await nodes_of(gateway, episode))[-1]
        assert gateway.model.renderer.decode(turn["ids"]).startswith(text)


async def test_a_sampled_call_can_be_sent_back_in_every_api(stage: Stage) -> None:
    """The call is as deep as one may be: Anthropic's form holds the arguments as an object inside the body."""
    gateway, engine = stage
    arguments = nested(MAX_SAMPLED_DEPTH - 1)  # one more is the call itself
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    _, headers = await gateway.open(mode="eval")
    engine.replies += [text, "ok"]
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {"model": "m", "max_tokens": 2000, "tools": [tool], "messages": [USER]}
    response = await gateway.http.post("/v1/messages", json=body, headers=headers)
    content = response.json()["content"]
    (call,) = [block for block in content if block["type"] == "tool_use"]
    assert call["input"] == json.loads(arguments)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "1"}
    body["messages"] = [
        USER,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    response = await gateway.http.post("/v1/messages", json=body, headers=headers)
    assert response.status_code == 200, response.text


async def test_an_episodes_metadata_are_refused_by_name(stage: Stage) -> None:
    gateway, _ = stage
    for depth, param in ((MAX_DEPTH, "metadata"), (300, "metadata"), (3000, None)):
        body = f'{{"task_id": "t", "mode": "eval", "metadata": {nested(depth)}}}'
        response = await gateway.http.post(
            "/admin/v1/episodes", content=body, headers={"content-type": "application/json"}
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), response.text
        assert error["code"] == ("body_too_deep" if param else "invalid_json")


async def test_a_manifest_is_refused_by_name(stage: Stage, tmp_path: Path) -> None:
    gateway, _ = stage
    (tmp_path / "manifest.json").write_text("[" * 5000)
    response = await gateway.http.post("/admin/v1/weights", json={"version": 1, "path": str(tmp_path)})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "bad_manifest")
    assert "manifest.json" in response.json()["error"]["message"]


WRITTEN = {
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "hermes": '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>',
    "mistral": '[TOOL_CALLS][{{"name": "add", "arguments": {}}}]',
    "phi": '<|tool_call|>{{"name": "add", "arguments": {}}}<|/tool_call|>',
    "llama": '{{"name": "add", "parameters": {}}}',
}


@pytest.mark.parametrize("form", TOOL_FORMS, ids=lambda form: form.name)
async def test_no_familys_form_reads_what_is_too_deep(form: ToolForm) -> None:
    if form.name == "glm":  # a value that cannot be read is a string there
        text = "<tool_call>add<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"
        for arguments in (nested(3000), nested(MAX_DEPTH)):
            (call,) = form.parse(text.format(arguments))
            assert json.loads(call.arguments) == {"a": arguments}
        return
    text = WRITTEN[form.name]
    assert [call.name for call in form.parse(text.format(nested(5)))] == ["add"]
    for arguments in (nested(3000), nested(MAX_DEPTH), json.dumps("[" * 3000)):
        assert form.parse(text.format(arguments)) == []
