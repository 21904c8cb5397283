"""Requests that OpenAI's API or Anthropic's refuses: each dialect refuses them too, and names the request's field."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects import chat, completions, messages, responses, responses_input
from gateway.dialects.responses_tools import Toolbox
from headgate.errors import BadRequest

HI = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]}
GIVEN = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
TWICE = {**CALLED, "tool_calls": CALLED["tool_calls"] * 2}
USED_TWICE = {**USED, "content": USED["content"] * 2}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def ask_chat(**values: Any) -> None:
    chat.parse({"model": "m", "messages": [HI], **values})


def ask_responses(**values: Any) -> None:
    made = responses.parse({"model": "m", "input": "hi", **values})
    found = responses_input.messages(responses_input.items(made.input))
    responses.generation_request(made, Toolbox.of(made.tools or (), "refuse"), found, values)


def ask_messages(**values: Any) -> None:
    messages.parse({"model": "m", "max_tokens": 9, "messages": [HI], **values})


def complete(**values: Any) -> None:
    completions.parse({"model": "m", "prompt": "hi", **values})


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def anthropic(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


@pytest.mark.parametrize(
    ("ask", "values", "param"),
    [
        (ask_chat, {"n": "2"}, "n"),
        (ask_chat, {"n": True}, "n"),
        (ask_chat, {"max_tokens": True}, "max_tokens"),
        (ask_chat, {"temperature": "1"}, "temperature"),
        (ask_chat, {"stream": "true"}, "stream"),
        (ask_chat, {"stream": 1}, "stream"),
        (ask_chat, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (ask_chat, {"stop": 5}, "stop"),
        (ask_chat, {"stop": ["a", None]}, "stop.1"),
        (ask_chat, {"stop": ""}, "stop"),
        (ask_chat, {"tool_choice": 5}, "tool_choice"),
        (ask_chat, {"logit_bias": {"a": 1}}, "logit_bias.a"),
        (complete, {"logprobs": True}, "logprobs"),
        (ask_responses, {"input": 5}, "input"),
        (ask_messages, {"max_tokens": "9"}, "max_tokens"),
        (ask_messages, {"metadata": {"colour": "red"}}, "metadata.colour"),
        (ask_messages, {"stop_sequences": ["x", " \n"]}, "stop_sequences.1"),
        (
            ask_messages,
            {"max_tokens": 1024, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "max_tokens",
        ),
        (
            ask_messages,
            {"max_tokens": 4096, "temperature": 0.5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "temperature",
        ),
        (ask_chat, {"tools": [function(parameters="{}")]}, "tools.0.function.parameters"),
        (ask_chat, {"tools": [function(parameters={"type": "objekt"})]}, "tools.0.function.parameters.type"),
        (ask_chat, {"tools": [function(parameters={"type": "array"})]}, "tools.0.function.parameters.type"),
        (ask_chat, {"tools": [function("a b")]}, "tools.0.function.name"),
        (ask_chat, {"tools": [function("é")]}, "tools.0.function.name"),
        (ask_chat, {"tools": [function("f" * 129)]}, "tools.0.function.name"),
        (ask_chat, {"tools": [function(), function()]}, "tools.1.function.name"),
        (ask_messages, {"tools": [anthropic("a b")]}, "tools.0.name"),
        (ask_messages, {"tools": [anthropic(), anthropic()]}, "tools.1.name"),
        (ask_messages, {"tools": [anthropic(input_schema={"type": "objekt"})]}, "tools.0.input_schema.type"),
        (
            ask_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (ask_chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            ask_chat,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        (ask_chat, {"messages": [{**HI, "name": 5}]}, "messages.0.name"),
        (ask_chat, {"messages": [HI, RESULT]}, "messages.1.tool_call_id"),
        (ask_chat, {"messages": [HI, CALLED, RESULT, RESULT]}, "messages.3.tool_call_id"),
        (ask_chat, {"messages": [HI, TWICE, RESULT]}, "messages.1.tool_calls.1.id"),
        (ask_messages, {"messages": [HI, USED_TWICE, {"role": "user", "content": [GIVEN]}]}, "messages"),
        (ask_responses, {"input": [CALL, CALL, OUTPUT]}, "input"),
        (ask_chat, {"messages": [HI, CALLED, HI]}, "messages.1.tool_calls"),
        (ask_chat, {"messages": [HI, CALLED, HI, RESULT]}, "messages.1.tool_calls"),
        (ask_messages, {"messages": [{"role": "user", "content": [GIVEN]}]}, "messages"),
        (ask_messages, {"messages": [HI, USED, {"role": "user", "content": [GIVEN, GIVEN]}]}, "messages"),
        (ask_messages, {"messages": [HI, USED, HI]}, "messages"),
        (ask_responses, {"input": [OUTPUT]}, "input"),
        (ask_responses, {"input": [CALL, OUTPUT, OUTPUT]}, "input"),
        (ask_responses, {"input": [CALL, HI]}, "input"),
        (ask_chat, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        *(
            (ask_chat, {"structured_outputs": empty}, "structured_outputs")
            for empty in ({}, {"json": None}, {"json_object": False}, {"disable_any_whitespace": False})
        ),
        (ask_chat, {"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        (ask_chat, {"structured_outputs": {"json": 0}}, "structured_outputs.json"),
        (ask_chat, {"structured_outputs": {"regex": False}}, "structured_outputs.regex"),
        (ask_chat, {"structured_outputs": {"backend": 0}}, "structured_outputs.backend"),
        (ask_chat, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        (ask_chat, {"guided_grammar": " "}, "guided_grammar"),
        (ask_chat, {"guided_regex": ["a"]}, "guided_regex"),
        (ask_chat, {"guided_regex": "a", "tools": [TOOL], "tool_choice": "required"}, "guided_regex"),
        (
            ask_chat,
            {
                "structured_outputs": {"json_object": True},
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
            },
            "structured_outputs.json_object",
        ),
        (ask_chat, {"guided_json": "{"}, "guided_json"),
        (ask_chat, {"guided_json": {"type": "objekt"}}, "guided_json.type"),
        (ask_chat, {"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs.regex"),
        (ask_chat, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        (ask_chat, {"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        (ask_chat, {"chat_template_kwargs": {"enable_thinking": 0}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_its_field(ask: Any, values: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        ask(**values)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("ask", "values"),
    [
        (ask_chat, {"messages": [HI, CALLED, RESULT, HI, CALLED, RESULT]}),
        (ask_chat, {"tools": [function(), function("g", parameters={})], "logit_bias": {"5": 1}}),
        (ask_messages, {"messages": [HI, USED, {"role": "user", "content": [GIVEN]}]}),
        (ask_responses, {"input": [HI, CALL, HI, OUTPUT]}),
        (ask_chat, {"temperature": 1, "top_p": 1, "max_tokens": 5}),
    ],
)
def test_what_is_right_is_taken(ask: Any, values: Any) -> None:
    ask(**values)
