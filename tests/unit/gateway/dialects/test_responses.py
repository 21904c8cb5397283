"""Parsing of Responses API requests, and their refusals."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from gateway.dialects.forms import any_object
from gateway.dialects.responses import _UNSUPPORTED, ResponsesRequest, generation_request, parse
from gateway.dialects.responses_input import items, messages, response_of, with_ids
from gateway.dialects.responses_tools import Toolbox
from gateway.render.constraints import ContentForm
from headgate.errors import BadRequest

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


def request(**values: Any) -> Any:
    return parse({"model": "m", "input": "hi", **values})


def converted(**values: Any) -> Any:
    made = request(**values)
    return generation_request(
        made, Toolbox.of(made.tools or (), "refuse"), messages(items(made.input)), values
    )


def replied(text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def test_a_string_is_a_message_of_the_user() -> None:
    assert messages(items("hi")) == [{"role": "user", "content": "hi"}]


def test_parameters_are_handed_on() -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 7, "stream": True}
    made = converted(**given, include=["message.output_text.logprobs"], top_logprobs=3, metadata={"a": "b"})
    assert (made.api, made.model, made.n) == ("responses", "m", 1)
    assert (made.temperature, made.top_p, made.max_tokens, made.stream) == (0.5, 0.25, 7, True)
    assert (made.logprobs, made.top_logprobs) == (True, 3)
    assert made.recorded["metadata"] == {"a": "b"}
    assert not made.recorded.keys() & {"input", "tools", "instructions"}


def test_instructions_come_first_and_as_a_system_message() -> None:
    made = converted(instructions="Be short.", input=[{"role": "developer", "content": "x"}])
    assert made.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "x"},
    ]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, "function:add"),
    ],
)
def test_tools_and_their_choice_in_the_form_of_chat(given: Any, choice: str) -> None:
    made = converted(tools=[ADD], tool_choice=given, parallel_tool_calls=False)
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert made.tools == [{"type": "function", "function": function}]
    assert (made.tool_choice, made.parallel_tool_calls) == (choice, False)


def test_a_schema_in_the_form_of_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "pair", "schema": schema, "strict": True}
    made = converted(text={"format": form, "verbosity": None})
    assert made.form == ContentForm("json", schema, "text.format")
    assert converted(text={"format": {"type": "json_object"}}).form == any_object("text.format")
    assert converted(text={"format": {"type": "text"}}).form is None
    assert converted().form is None


def test_the_items_of_one_reply_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    found = messages(
        items([{"role": "user", "content": "hi"}, reasoning, replied("so"), CALL, OUTPUT, replied("3!")])
    )
    function = {"name": "add", "arguments": "{}"}
    assert found == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "content": "3!"},
    ]


def test_a_summary_stands_for_reasoning_that_is_not_shown() -> None:
    summary = [{"type": "summary_text", "text": "thought"}]
    found = messages(
        items([{"type": "reasoning", "summary": summary, "encrypted_content": "x"}, replied("a")])
    )
    assert found == [{"role": "assistant", "content": "a", "reasoning_content": "thought"}]
    (without,) = messages(items([{"type": "reasoning", "summary": []}, replied("a")]))
    assert without == {"role": "assistant", "content": "a"}


def test_ids_show_where_one_reply_ends_and_the_next_begins() -> None:
    one, two = replied("a", id="msg_00aa_0"), replied("b", id="msg_00aa_2")
    assert [m["content"] for m in messages(items([one, two]))] == ["ab"]
    assert [m["content"] for m in messages(items([one, replied("b", id="msg_00bb_0")]))] == ["a", "b"]
    assert [m["content"] for m in messages(items([replied("a"), replied("b")]))] == ["a", "b"]


@pytest.mark.parametrize(
    "given",
    [
        "hi",
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, replied("b"), CALL, OUTPUT],
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "id": "rs_mine"}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{**OUTPUT, "output": [{"type": "input_text", "text": "3"}]}, {"role": "system", "content": "s"}],
    ],
)
def test_listed_items_are_what_the_sdk_knows(given: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    shown = with_ids(items(given), "resp_00ff")
    for item in shown:
        assert adapter.validate_python(item).model_dump(exclude_unset=True) == item
    assert len({item["id"] for item in shown}) == len(shown)
    assert all(response_of(item) == "resp_00ff" for item in shown if item["id"] != "rs_mine")
    assert messages(items(shown)) == messages(items(given)), "the list means the same"


def test_neutral_values_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "background": False,
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "text": {"verbosity": "medium"},
        "max_tool_calls": None,
    }
    assert converted(**neutral).messages == [{"role": "user", "content": "hi"}]


def test_advice_is_taken_and_recorded() -> None:
    advice: dict[str, Any] = {
        "reasoning": {"effort": "high", "summary": "detailed", "context": "all_turns"},
        "truncation": "auto",
        "service_tier": "flex",
        "text": {"verbosity": "low"},
    }
    made = converted(**advice)
    assert (made.effort, made.form) == ("high", None)
    assert made.recorded == advice
    for wrong in ({"reasoning": {"effort": "all"}}, {"text": {"verbosity": "all"}}, {"truncation": "all"}):
        with pytest.raises(BadRequest):
            converted(**wrong)


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"text": {"form": 1}}, "unknown_parameter", "text.form"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [3]}, "invalid_value", "input.0"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "invalid_value", "input.0"),
        ({"input": [{"role": "user"}]}, "invalid_value", "input.0.content"),
        ({"input": [CALL, {**OUTPUT, "output": None}]}, "invalid_value", "input.1.output"),
        ({"input": [{**CALL, "arguments": {}}]}, "invalid_value", "input.0"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_content", "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_content",
            "input.0.content.0",
        ),
        (
            {"input": [{**OUTPUT, "output": [{"type": "input_file", "file_id": "f"}]}]},
            "unsupported_content",
            "input.0.output.0",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "invalid_value",
            "input.0.content.0",
        ),
        ({"tools": [{"type": "function"}]}, "invalid_value", "tools.0"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "invalid_value", "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "invalid_value", "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "invalid_schema", "text.format.schema"),
        ({"text": {"format": "json"}}, "invalid_value", "text.format"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "invalid_value", "stream_options"),
        ({"metadata": {"a": "x" * 513}}, "invalid_value", "metadata.a"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(BadRequest) as error:
        converted(**given)
    assert (error.value.code, error.value.param) == (code, param)


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
WORDS = st.sampled_from(
    ["type", "role", "content", "text", "id", "name", "output", "call_id", "arguments", "summary", "format"]
)
KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text"]
)
JSON: Any = st.recursive(
    SCALARS | KINDS | st.sampled_from(["user", "assistant", "function", "json_schema", "output_text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)


@given_by(
    st.dictionaries(
        st.sampled_from(sorted({*ResponsesRequest.model_fields, *_UNSUPPORTED})), JSON, max_size=4
    )
)
def test_whatever_is_sent_is_understood_or_refused(values: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest):
        made = parse({"model": "m", "input": "hi", **values})
        found = items(made.input)
        if not any(item["type"] == "item_reference" for item in found):
            generation_request(made, Toolbox.of(made.tools or (), "drop"), messages(found), values)
