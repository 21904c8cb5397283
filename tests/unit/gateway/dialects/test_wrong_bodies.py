"""Requests that a dialect refuses, as its vendor's API does or because the gateway lacks a feature: the error names the field.

The error for an unsupported feature names an alternative.
"""

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

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PDF = {"type": "document", "source": {}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
AUDIO = {"type": "input_audio", "input_audio": {}}


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
        (ask_messages, {"metadata": {"color": "red"}}, "metadata.color"),
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
def test_a_wrong_value_is_refused_by_the_name_of_its_field(ask: Any, values: Any, param: str) -> None:
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
def test_right_values_are_accepted(ask: Any, values: Any) -> None:
    ask(**values)


@pytest.mark.parametrize(
    ("ask", "values", "param", "instead"),
    [
        (ask_chat, {"functions": [{"name": "f"}]}, "functions", "send them as `tools`"),
        (ask_chat, {"function_call": "auto"}, "function_call", "send `tool_choice`"),
        (ask_chat, {"modalities": ["audio"]}, "modalities", "writes text"),
        (ask_chat, {"audio": {"voice": "v"}}, "audio", "writes text"),
        (ask_chat, {"moderation": {"model": "m"}}, "moderation", "before and after"),
        (ask_chat, {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "send"),
        (ask_chat, {"prediction": {"type": "content"}}, "prediction", "leave it out"),
        (ask_chat, {"web_search_options": {"a": 1}}, "web_search_options", "offer a tool"),
        (ask_chat, {"messages": [{**HI, "content": [AUDIO]}]}, "messages.0.content.0", "as text"),
        (ask_chat, {"tools": [{"type": "custom"}]}, "tools.0", "offer a function"),
        (ask_chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "send only those"),
        (ask_chat, {"provider": {"order": ["a"]}}, "provider", "chooses the engine"),
        (ask_chat, {"return_token_ids": True}, "return_token_ids", "/tokens"),
        (ask_chat, {"skip_special_tokens": False}, "skip_special_tokens", "/tokens"),
        (ask_chat, {"include_stop_str_in_output": True}, "include_stop_str_in_output", "append"),
        (ask_chat, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "enable_thinking"),
        (
            ask_chat,
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "regex",
        ),
        (complete, {"prompt_logprobs": 1}, "prompt_logprobs", "of the reply"),
        (ask_responses, {"ignore_eos": True}, "ignore_eos", "/v1/chat/completions"),
        (ask_chat, {"response_format": {"type": "grammar"}}, "response_format", "'json_schema'"),
        (
            ask_responses,
            {"prompt_cache_options": {"comparison_response_id": "r"}},
            "prompt_cache_options.comparison_response_id",
            "leave it out",
        ),
        (ask_responses, {"moderation": {}}, "moderation", "before and after"),
        (ask_responses, {"background": True}, "background", "stream"),
        (ask_responses, {"conversation": "c"}, "conversation", "previous_response_id"),
        (ask_responses, {"context_management": [{}]}, "context_management", "shorten"),
        (ask_responses, {"prompt": {"id": "p"}}, "prompt", "`instructions`"),
        (ask_responses, {"max_tool_calls": 1}, "max_tool_calls", "count the calls"),
        (ask_responses, {"include": ["x"]}, "include", "leave it out"),
        (ask_responses, {"input": [{"type": "compaction"}]}, "input.0", "leave it out"),
        (ask_responses, {"tools": [{"type": "web_search"}]}, "tools.0", "your client runs"),
        (ask_responses, {"tool_choice": {"type": "mcp"}}, "tool_choice", "a named function"),
        (ask_responses, {"text": {"format": {"type": "regex"}}}, "text.format", "'json_schema'"),
        (ask_messages, {"mcp_servers": [{"url": "u"}]}, "mcp_servers", "in your client"),
        (ask_messages, {"container": "c"}, "container", "a tool of your own"),
        (ask_messages, {"speed": "fast"}, "speed", "leave it out"),
        (ask_messages, {"messages": [{**HI, "content": [PDF]}]}, "messages.0.content.0", "as text"),
        (ask_messages, {"tools": [{"type": "bash_20250124"}]}, "tools.0", "input_schema"),
        (ask_messages, {"messages": [HI, {**HI, "role": "assistant"}]}, "messages", "end with the user's"),
        (ask_messages, {"thread": {"type": "create"}}, "thread", "send all messages"),
        (
            ask_messages,
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits.0",
            "before you send",
        ),
        (
            ask_messages,
            {"output_config": {"format": {"type": "regex"}}},
            "output_config.format",
            "send a json_schema",
        ),
        (complete, {"suffix": "x"}, "suffix", "in the prompt"),
        (complete, {"best_of": 3}, "best_of", "choose among them"),
        (complete, {"echo": True, "logprobs": 1}, "echo", "leave out `logprobs`"),
    ],
)
def test_the_error_names_an_alternative(ask: Any, values: dict[str, Any], param: str, instead: str) -> None:
    with pytest.raises(BadRequest) as refused:
        ask(**values)
    assert (refused.value.code or "").startswith("unsupported_")
    assert refused.value.param == param
    refusal, _, advice = refused.value.message.partition(" here: ")
    assert refusal.startswith(f"{param}: ")
    assert instead in advice


@pytest.mark.parametrize("unsupported", [chat._UNSUPPORTED, responses._UNSUPPORTED, messages._UNSUPPORTED])
def test_neutral_values_of_unsupported_fields_are_accepted(unsupported: dict[str, Any]) -> None:
    for name, (neutral, instead) in unsupported.items():
        assert instead
        ask = {id(chat._UNSUPPORTED): ask_chat, id(messages._UNSUPPORTED): ask_messages}.get(
            id(unsupported), ask_responses
        )
        for value in (None, *neutral):
            ask(**{name: value})


@pytest.mark.parametrize("ask", [ask_chat, ask_responses])
def test_options_of_prompt_caching_are_accepted(ask: Any) -> None:
    ask(prompt_cache_options={"mode": "explicit", "ttl": "12h", "prewarm": False})
    with pytest.raises(BadRequest, match="mode"):
        ask(prompt_cache_options={"mode": "never"})


SHOWN = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "seen:"}, PICTURE]}


@pytest.mark.parametrize(
    ("ask", "values", "param"),
    [
        (ask_chat, {"messages": [{**HI, "content": [IMAGE]}]}, "messages.0.content.0"),
        (
            ask_chat,
            {"messages": [HI, CALLED, {"role": "tool", "tool_call_id": "c1", "content": [IMAGE]}]},
            "messages.2.content.0",
        ),
        (ask_responses, {"input": [{**HI, "content": [SEEN]}]}, "input.0.content.0"),
        (ask_responses, {"input": [CALL, {**OUTPUT, "output": [SEEN]}]}, "input.1.output.0"),
        (ask_messages, {"messages": [{**HI, "content": [PICTURE]}]}, "messages.0.content.0"),
        (
            ask_messages,
            {"messages": [HI, USED, {**HI, "content": [SHOWN]}]},
            "messages.2.content.0.content.1",
        ),
    ],
    ids=["chat", "chat: a tool", "responses", "responses: a tool", "messages", "messages: a tool"],
)
def test_an_image_is_refused_for_what_the_gateway_cannot_do_and_not_for_the_model(
    ask: Any, values: dict[str, Any], param: str
) -> None:
    """A model that could see cannot be blamed while its engine is given none. Tools of coding agents return images too."""
    with pytest.raises(BadRequest) as refused:
        ask(**values)
    assert (refused.value.code, refused.value.param) == ("unsupported_content", param)
    assert "is given no images" in refused.value.message
    assert "upstream model" in refused.value.message
