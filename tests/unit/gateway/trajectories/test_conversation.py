"""Digests of conversations: equal exactly where a request continues what was recorded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.trajectories.conversation import digests

TOOL = {"type": "function", "function": {"name": "add"}}
USER = {"role": "user", "content": "hi"}

message = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant"]),
    st.text(max_size=4),
)
conversation = st.lists(message, min_size=1, max_size=5)


def last(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> bytes:
    return digests(messages, tools or [])[-1]


def call(arguments: Any, call_id: str = "call_1", name: str = "add") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


@given(conversation)
def test_there_is_one_digest_for_every_prefix(messages: list[dict[str, Any]]) -> None:
    chain = digests(messages, [])
    assert len(chain) == len(messages) + 1
    for known in range(len(messages) + 1):
        assert chain[known] == digests(messages[:known], [])[-1]


@given(conversation, conversation)
def test_only_equal_conversations_have_equal_digests(left: list[Any], right: list[Any]) -> None:
    assert (last(*left) == last(*right)) is (left == right)


def test_tools_are_part_of_it() -> None:
    assert last(USER) != last(USER, tools=[TOOL])


def test_reasoning_that_a_client_sends_back_or_not_changes_nothing() -> None:
    plain = {"role": "assistant", "content": "yes"}
    assert last(USER, plain) == last(USER, {**plain, "reasoning_content": "because"})


def test_fields_that_sdks_add_change_nothing() -> None:
    plain = {"role": "assistant", "content": "yes"}
    added = {**plain, "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    assert last(USER, plain) == last(USER, added)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_the_name_of_a_speaker_counts(role: str) -> None:
    message = {"role": role, "content": "hi"}
    names = [last(message), last({**message, "name": "ann"}), last({**message, "name": "bob"})]
    assert len(set(names)) == 3


def test_the_name_that_a_client_gives_a_reply_changes_nothing() -> None:
    plain = {"role": "assistant", "content": "yes"}
    assert last(USER, plain) == last(USER, {**plain, "name": "solver"})


def test_refusals_count_as_the_text_that_they_are() -> None:
    def refused(text: str) -> list[dict[str, Any]]:
        part = {"type": "refusal", "refusal": text}
        return [{"role": "assistant", "content": [part]}, {"role": "assistant", "refusal": text}]

    part, field = refused("no")
    assert last(USER, part) == last(USER, field) == last(USER, {"role": "assistant", "content": "no"})
    assert last(USER, part) != last(USER, refused("never")[0])


def test_text_parts_mean_their_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert last(USER) == last({"role": "user", "content": parts})


@pytest.mark.parametrize("same", ['{"a": 1, "b": 2}', '{"b":2,"a":1}', {"b": 2, "a": 1}])
def test_tool_arguments_are_compared_by_their_value(same: Any) -> None:
    assert last(USER, call('{"a":1,"b":2}')) == last(USER, call(same))


@pytest.mark.parametrize("nothing", ["", " ", "null", None])
def test_a_call_without_arguments_is_one_with_none(nothing: Any) -> None:
    assert last(USER, call(nothing)) == last(USER, call("{}"))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "1e999"])
def test_a_constant_that_json_does_not_have_is_not_null(constant: str) -> None:
    assert last(USER, call(f'{{"a": {constant}}}')) != last(USER, call('{"a": null}'))


def test_other_arguments_or_names_differ() -> None:
    assert last(USER, call('{"a":1}')) != last(USER, call('{"a":2}'))
    assert last(USER, call("{}")) != last(USER, call("{}", name="sub"))
    assert last(USER, call("not JSON")) != last(USER, call("{}"))


def test_an_argument_that_has_its_tools_default_value_is_as_one_left_out() -> None:
    """Claude Code sends back `replace_all: false` in every call of Edit, whether or not the model wrote it."""
    properties = {"path": {"type": "string"}, "all": {"type": "boolean", "default": False}, "odd": True}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    plain = last(USER, call('{"path":"a"}'), tools=tools)
    assert last(USER, call('{"all":false,"path":"a"}'), tools=tools) == plain
    for other in (
        '{"path":"a","all":true}',
        '{"path":"a","all":0}',
        '{"path":"a","odd":true}',
        '{"path":"b"}',
    ):
        assert last(USER, call(other), tools=tools) != plain
    assert last(USER, call('{"path":"a"}', name="sub"), tools=tools) != plain
    assert last(USER, call('{"a":1,"all":false}')) != last(USER, call('{"a":1}'))


def test_ids_count_in_answers_to_tool_calls_and_not_in_the_calls() -> None:
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    assert last(USER, call("{}", "call_1")) == last(USER, call("{}", "call_2"))
    assert last(USER, answer) != last(USER, {**answer, "tool_call_id": "call_2"})


def test_a_message_without_content_is_one_with_none() -> None:
    assert last(USER, {"role": "assistant", "content": None}) == last(USER, {"role": "assistant"})
    assert last(USER, {"role": "assistant", "content": ""}) == last(USER, {"role": "assistant"})


def test_the_digest_is_of_this_form_for_good() -> None:
    """Digests are stored: another build must find the same ones."""
    assert [digest.hex() for digest in digests([USER], [])] == [
        "7ebb3c7c2a87b1a2f8a7ed729ecb040d",
        "00df10d110714a5acbef3de958fd4bd0",
    ]


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}', "[" * 400 + "]" * 400, '{"a": 1e400}'],
)
def test_arguments_that_json_libraries_do_not_agree_on_are_compared_as_they_are_written(
    arguments: str,
) -> None:
    def conversation(text: str) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        return [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]

    assert digests(conversation(arguments), []) == digests(conversation(arguments), [])
    assert digests(conversation(arguments), [])[-1] != digests(conversation('{"a": 1}'), [])[-1]


def test_a_number_is_the_same_however_it_is_written() -> None:
    def digest(text: str) -> bytes:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        return digests([{"role": "assistant", "content": "", "tool_calls": [call]}], [])[-1]

    assert digest('{"a": 1.0}') == digest('{"a":1}')
    assert digest('{"a": 1.5}') != digest('{"a": 1}')
