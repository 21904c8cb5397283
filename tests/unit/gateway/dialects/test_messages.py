"""Conversion of Anthropic requests to the chat form; unsupported parameters are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.messages import MessagesRequest, parse, parse_count
from gateway.dialects.request import check_messages, check_tools
from gateway.render.constraints import ContentForm
from headgate.errors import BadRequest

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def body(**values: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": [HI], **values}


def messages_of(*messages: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    return parse(body(messages=list(messages), **values))[1].messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(tool: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": tool, "content": content, **more}


def test_the_fields_of_a_request() -> None:
    request, converted = parse(
        body(
            system="be kind",
            tools=[{**ADD, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            stop_sequences=["END"],
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            stream=True,
            metadata={"user_id": "u"},
        )
    )
    assert (converted.api, converted.model, converted.n, converted.stream) == ("messages", "m", 1, True)
    assert converted.messages == [{"role": "system", "content": "be kind"}, HI]
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
    assert converted.tools == [{"type": "function", "function": function}]
    assert (converted.tool_choice, converted.parallel_tool_calls) == ("auto", False)
    assert (converted.max_tokens, converted.max_tokens_may_exceed, converted.stop) == (10, True, ("END",))
    assert (converted.temperature, converted.top_p, converted.top_k) == (0.5, 0.9, 5)
    assert converted.recorded["metadata"] == {"user_id": "u"}
    assert not {"messages", "tools", "system"} & converted.recorded.keys()
    assert request.max_tokens == 10


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, "function:add"),
    ],
)
def test_tool_choices(choice: dict[str, str] | None, expected: str) -> None:
    assert parse(body(tools=[ADD], tool_choice=choice))[1].tool_choice == expected


def test_a_format_is_a_json_schema() -> None:
    given = {"type": "json_schema", "schema": SCHEMA}
    named = parse(body(output_config={"format": given}))[1].form
    assert named == ContentForm("json", SCHEMA, "output_config.format")
    assert parse(body(output_format=given))[1].form == ContentForm("json", SCHEMA, "output_format")
    assert parse(body(output_config={"effort": "high"}))[1].form is None


def test_results_of_tools_come_first_and_in_order() -> None:
    assert messages_of(
        HI,
        assistant(
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            *(text("so "), text("there"), USE, {**USE, "id": "call_2"}),
        ),
        user(text("and"), result("call_1", "3"), result("call_2", [text("x"), text("y")]), text("go on")),
    )[1:] == [
        {
            "role": "assistant",
            "content": "so there",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
                for name in ("call_1", "call_2")
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": "x\ny"},
        {"role": "user", "content": "and\ngo on"},
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [("no file", "Error: no file"), ("Error 5", "Error 5"), (None, "Error: "), ([], "Error: ")],
)
def test_a_result_that_is_an_error_starts_with_that_word(content: Any, expected: str) -> None:
    messages = messages_of(HI, assistant(USE), user(result("call_1", content, is_error=True)))
    assert messages[-1]["content"] == expected


def test_consecutive_messages_of_one_role_are_one_turn() -> None:
    assert messages_of(HI, user(text("you")), assistant(text("a")), assistant(text("b")), HI) == [
        {"role": "user", "content": "hi\nyou"},
        {"role": "assistant", "content": "ab"},
        HI,
    ]


def test_a_system_message_stays_where_it_is() -> None:
    given = [HI, {"role": "system", "content": "now be brief"}, HI]
    assert messages_of(*given) == given


def test_a_system_message_with_clear_at_ends_at_the_next_user_message() -> None:
    note = {"role": "system", "content": "now be brief"}
    passing = {**note, "clear_at": "next_user_message"}
    assert messages_of(HI, passing) == [HI, note]
    assert messages_of(HI, passing, assistant(text("a")), HI, {**note, "clear_at": "never"}) == [
        HI,
        {"role": "assistant", "content": "a"},
        HI,
        note,
    ]


def test_a_system_message_sets_the_effort_of_its_turn() -> None:
    low = {"role": "system", "output_config": {"effort": "low"}}
    config = {"effort": "high"}
    for conversation, effort in (([HI, low], "low"), ([HI, low, assistant(text("a")), HI], "high")):
        converted = parse(body(messages=conversation, output_config=config))[1]
        assert converted.effort == effort
        assert all(message["role"] != "system" for message in converted.messages)


@pytest.mark.parametrize("number", ["a1", "b2"])
def test_who_pays_is_no_part_of_the_prompt(number: str) -> None:
    bill = f"x-anthropic-billing-header: cc_version=2.1.177; cch={number};"
    expected = [{"role": "system", "content": "You code.\nWell."}, HI]
    blocks = [text(bill), text("You code.", cache_control={"type": "ephemeral"}), text("Well.")]
    assert messages_of(HI, system=blocks) == expected
    assert messages_of(HI, system=f"{bill}\nYou code.\nWell.") == expected
    assert messages_of(HI, system=[text(bill)]) == [HI]
    assert bill in messages_of({"role": "user", "content": bill})[0]["content"]


def test_what_changes_nothing_is_accepted() -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    plain = messages_of(HI, assistant(text("a")), HI)
    assert plain == messages_of(
        user(text("hi", cache_control=control, citations=None)),
        assistant({"type": "redacted_thinking", "data": "xyz"}, text("a", citations=None)),
        user(text("hi", cache_control=control)),
        cache_control=control,
        service_tier="auto",
        speed="standard",
        thinking={
            "type": "adaptive",
            "display": "omitted",
            "block_binding": {"prefix_mismatch_behavior": "drop_block"},
        },
        output_config={"effort": "max", "task_budget": {"type": "tokens", "total": 20000, "remaining": 0}},
        billing_policy={"type": "billing_policy", "bill_to": "self"},
        inference_geo="global",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        diagnostics={"previous_message_id": None},
        tools=[{**ADD, "eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}],
    )


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": [], "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user()]}, "messages.0.content"),
        ({"messages": [{**HI, "name": "x"}]}, "messages.0.name"),
        ({"messages": [user("x")]}, "messages.0.content.0"),
        ({"messages": [user(text("x"), IMAGE)]}, "messages.0.content.1"),
        ({"messages": [user(text("x", lang="en"))]}, "messages.0.content.0.lang"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user(USE)]}, "messages.0.content.0"),
        ({"messages": [HI, assistant(result("call_1", "x")), HI]}, "messages.1.content.0"),
        ({"messages": [HI, assistant({**USE, "input": "{}"}), HI]}, "messages.1.content.0.input"),
        ({"messages": [HI, assistant({**USE, "id": None}), HI]}, "messages.1.content.0.id"),
        ({"messages": [user(result("call_1", [IMAGE]))]}, "messages.0.content.0.content.0"),
        ({"system": 5}, "system"),
        ({"system": [IMAGE]}, "system.0"),
        ({"tools": ["add"]}, "tools.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"name": "add"}]}, "tools.0"),
        ({"tools": [{**ADD, "description": 5}]}, "tools.0.description"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"thinking": {"type": "adaptive", "block_binding": {"x": 1}}}, "thinking.block_binding"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"fallback_credit_token": "t"}, "fallback_credit_token"),
        ({"messages": [HI, {**HI, "clear_at": "never"}]}, "messages.1.clear_at"),
        ({"messages": [HI, {"role": "system", "content": "x", "clear_at": "soon"}]}, "messages.1.clear_at"),
        (
            {"messages": [HI, {"role": "system", "output_config": {"effort": "most"}}]},
            "messages.1.output_config.effort",
        ),
        ({"messages": [HI, {"role": "system", "output_config": {}}]}, "messages.1.content"),
        ({"messages": [{"role": "system", "output_config": {"effort": "low"}}]}, "messages"),
    ],
)
def test_what_is_refused_is_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body(**values))
    assert param in (refused.value.param or "")
    assert param.split(".")[0] in refused.value.message  # Anthropic's form of errors has the message alone


def test_blocks_that_are_not_supported_are_named_by_their_type() -> None:
    for kind in ("image", "document", "search_result", "server_tool_use"):
        with pytest.raises(BadRequest, match=kind):
            parse(body(messages=[user({"type": kind})]))
    with pytest.raises(BadRequest, match="computer_20250124"):
        parse(body(tools=[{"type": "computer_20250124", "name": "computer"}]))


def test_an_input_that_is_nested_too_deep() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match=r"messages\.1\.content\.0\.input"):
        parse(body(messages=[HI, assistant({**USE, "input": deep}), HI]))


def test_counting_needs_less() -> None:
    converted = parse_count({"model": "m", "messages": [HI, assistant(text("a"))], "tools": [ADD]})
    assert [message["role"] for message in converted.messages] == ["user", "assistant"]
    assert len(converted.tools) == 1
    with pytest.raises(BadRequest, match="max_tokens"):
        parse_count(body())


noise = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"])
blocks = st.fixed_dictionaries(
    {"type": kinds | noise},
    optional={
        name: st.sampled_from(["x", {"a": 1}, [text("y")]]) | noise
        for name in ("text", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "data")
    },
)
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | noise,
        "content": st.lists(blocks | noise) | noise,
    },
    optional={
        "clear_at": st.just("next_user_message") | noise,
        "output_config": st.fixed_dictionaries({"effort": st.just("low") | noise}) | noise,
    },
)
tools = st.fixed_dictionaries(
    {},
    optional={name: st.sampled_from([ADD[name]]) | noise for name in ADD} | {"type": noise, "strict": noise},
)
choices = st.fixed_dictionaries(
    {"type": st.sampled_from(["any", "tool", "auto"]) | noise}, optional={"name": noise}
)
requests = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.just(9), "messages": st.lists(turns | noise, max_size=3)},
    optional={
        "system": st.lists(blocks, max_size=2) | noise,
        "tools": st.lists(tools | noise, max_size=2) | noise,
        "tool_choice": choices | noise,
        "output_config": st.fixed_dictionaries({"format": noise}) | noise,
        "context_management": st.fixed_dictionaries({"edits": st.lists(noise, max_size=2)}) | noise,
        **{
            name: noise
            for name in MessagesRequest.model_fields
            if name not in ("model", "messages", "max_tokens")
        },
    },
)


@given(requests)
def test_whatever_is_sent_is_understood_or_refused(values: dict[str, Any]) -> None:
    try:
        converted = parse(values)[1]
    except BadRequest:
        return
    check_messages(converted.messages)
    check_tools(converted.tools)
