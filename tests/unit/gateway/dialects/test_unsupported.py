"""Unsupported parameters in every dialect: the error names the parameter and the alternative."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects import chat, completions, messages, responses, responses_input
from gateway.dialects.responses_tools import Toolbox
from headgate.errors import BadRequest

HI = {"role": "user", "content": "hi"}
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
def test_the_error_says_what_to_do(ask: Any, values: dict[str, Any], param: str, instead: str) -> None:
    with pytest.raises(BadRequest) as refused:
        ask(**values)
    assert (refused.value.code or "").startswith("unsupported_")
    assert refused.value.param == param
    told, _, advice = refused.value.message.partition(" here: ")
    assert told.startswith(f"{param}: ")
    assert instead in advice


@pytest.mark.parametrize("unsupported", [chat._UNSUPPORTED, responses._UNSUPPORTED, messages._UNSUPPORTED])
def test_what_asks_for_nothing_is_taken_out(unsupported: dict[str, Any]) -> None:
    for name, (neutral, instead) in unsupported.items():
        assert instead
        ask = {id(chat._UNSUPPORTED): ask_chat, id(messages._UNSUPPORTED): ask_messages}.get(
            id(unsupported), ask_responses
        )
        for value in (None, *neutral):
            ask(**{name: value})


@pytest.mark.parametrize("ask", [ask_chat, ask_responses])
def test_how_prompts_are_cached_may_be_said(ask: Any) -> None:
    ask(prompt_cache_options={"mode": "explicit", "ttl": "12h", "prewarm": False})
    with pytest.raises(BadRequest, match="mode"):
        ask(prompt_cache_options={"mode": "never"})


USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
SHOWN = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen:"}, PICTURE]}
ASKED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look"}}]}


@pytest.mark.parametrize(
    ("ask", "values", "param"),
    [
        (ask_chat, {"messages": [{**HI, "content": [IMAGE]}]}, "messages.0.content.0"),
        (
            ask_chat,
            {"messages": [HI, CALLED, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}]},
            "messages.2.content.0",
        ),
        (ask_responses, {"input": [{**HI, "content": [SEEN]}]}, "input.0.content.0"),
        (
            ask_responses,
            {"input": [ASKED, {"type": "function_call_output", "call_id": "c", "output": [SEEN]}]},
            "input.1.output.0",
        ),
        (ask_messages, {"messages": [{**HI, "content": [PICTURE]}]}, "messages.0.content.0"),
        (
            ask_messages,
            {"messages": [HI, USES, {**HI, "content": [SHOWN]}]},
            "messages.2.content.0.content.1",
        ),
    ],
    ids=["chat", "chat: a tool", "responses", "responses: a tool", "messages", "messages: a tool"],
)
def test_an_image_is_refused_for_what_the_gateway_cannot_do_and_not_for_the_model(
    ask: Any, values: dict[str, Any], param: str
) -> None:
    """A model that could see cannot be blamed while its engine is given none. Tools of coding agents answer with images too."""
    with pytest.raises(BadRequest) as refused:
        ask(**values)
    assert (refused.value.code, refused.value.param) == ("unsupported_content", param)
    assert "is given no images" in refused.value.message
    assert "upstream model" in refused.value.message
