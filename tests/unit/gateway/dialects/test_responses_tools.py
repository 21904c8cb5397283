"""Tools of the Responses API: which functions stand for them, and the way of a call to the client and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.responses import generation_request, parse
from gateway.dialects.responses_input import items, messages
from gateway.dialects.responses_tools import Toolbox, offered
from gateway.trajectories.conversation import digests
from headgate.errors import BadRequest

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [ADD, PATCH]}
SEARCH = {"type": "web_search", "external_web_access": False}
NAMES = ["add", "patch", "agents.add", "agents.patch", "other", "agents.other"]


def call_of(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_functions_that_stand_for_tools() -> None:
    box = Toolbox.of([ADD, SEARCH, AGENTS, PATCH], "drop")
    functions = [tool["function"] for tool in box.functions]
    assert [function["name"] for function in functions] == ["add", "agents.add", "agents.patch", "patch"]
    assert functions[0] == {name: ADD[name] for name in ("name", "description", "parameters")}
    assert [f["description"] for f in functions[1:3]] == ["Sub-agents.\n\nAdds.", "Patches."]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions[3] == {
        "name": "patch",
        "description": "Patches.",
        "parameters": {**text, "additionalProperties": False},
    }
    assert box.left_out == ["web_search"]
    assert [tool["type"] for tool in offered([ADD, SEARCH, AGENTS])] == ["function", "namespace"]


@given(
    st.sampled_from(NAMES),
    st.one_of(
        st.text().map(lambda text: json.dumps({"input": text})),
        st.integers().map(lambda a: json.dumps({"a": a})),
    ),
)
def test_a_call_that_is_sent_back_is_the_recorded_one(name: str, arguments: str) -> None:
    call = call_of(name, arguments)
    shown = Toolbox.of([ADD, AGENTS, PATCH], "drop").call(call)
    custom = name.endswith("patch")
    assert shown["type"] == ("custom_tool_call" if custom else "function_call")
    assert (shown.get("namespace"), shown["name"]) == (
        ("agents", name.removeprefix("agents.")) if name in ("agents.add", "agents.patch") else (None, name)
    )
    if custom and "input" not in json.loads(arguments):
        assert shown["input"] == arguments, "all that the model wrote"
        return
    (again,) = messages(items([{**shown, "id": "fc_00ab_0"}]))
    recorded = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert digests([again], []) == digests([recorded], [])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "custom", "name": "patch"}, "function:patch"),
        ({"type": "function", "name": "add", "namespace": "agents"}, "function:agents.add"),
    ],
)
def test_the_tool_that_must_be_called(choice: dict[str, Any], expected: str) -> None:
    request = parse({"model": "m", "input": "hi", "tools": [ADD, AGENTS, PATCH], "tool_choice": choice})
    box = Toolbox.of(request.tools or (), "drop")
    assert generation_request(request, box, [], {}).tool_choice == expected


def test_a_grammar_is_described_to_the_model_by_the_setting() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    box = Toolbox.of([{**PATCH, "format": grammar}], "drop", "describe")
    (tool,) = box.functions
    assert tool["function"]["description"] == "Patches.\n\n`input` must follow this lark grammar:\nstart: /a/"
    assert box.call(call_of("patch", '{"input": "a"}'))["input"] == "a"


def test_the_output_of_a_custom_tool_is_a_tools_message() -> None:
    (result,) = messages(items([{"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}]))
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "ok"}


@pytest.mark.parametrize(
    ("tools", "param", "what_to_do"),
    [
        ([SEARCH], "tools.0", "your client runs; the setting .server. hosted_tools"),
        ([ADD, {"type": "telepathy"}], "tools.1", "'function', 'custom'"),
        ([{**AGENTS, "tools": [AGENTS]}], "tools.0.tools.0", "'function', 'custom'"),
        ([{"type": "namespace", "name": "n"}], "tools.0", "list of tools"),
        ([{"type": "custom"}], "tools.0", "name"),
        ([{**ADD, "name": "agents.add"}, AGENTS], "tools.0.name", "letters, digits"),
        ([{**AGENTS, "name": "a b"}], "tools.0.name", "letters, digits"),
        ([ADD, {**PATCH, "name": "add"}], "tools.1.name", "rename"),
        ([AGENTS, AGENTS], "tools.1.tools.0.name", "rename"),
        ([{**ADD, "parameters": {"type": "objekt"}}], "tools.0.parameters.type", "no type 'objekt'"),
        (
            [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}],
            "tools.0.format",
            "format 'text'.*tool_grammars",
        ),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_with_a_way_out(
    tools: list[Any], param: str, what_to_do: str
) -> None:
    with pytest.raises(BadRequest, match=what_to_do) as refused:
        Toolbox.of(tools, "refuse")
    assert refused.value.param == param
