"""Digests of conversations: equal exactly where a request continues what was recorded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.trajectories.conversation import digests

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


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_the_name_of_a_speaker_counts(role: str) -> None:
    message = {"role": role, "content": "hi"}
    names = [last(message), last({**message, "name": "ann"}), last({**message, "name": "bob"})]
    assert len(set(names)) == 3


YES = {"role": "assistant", "content": "yes"}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
NOTHING = {"role": "assistant", "content": None}


def refusal(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "refusal", "refusal": text}]}


@pytest.mark.parametrize(
    ("recorded", "received"),
    [
        pytest.param(YES, {**YES, "reasoning_content": "because"}, id="reasoning"),
        pytest.param(YES, {**YES, "refusal": None, "annotations": [], "audio": None, "tool_calls": None}, id="SDK fields"),
        pytest.param(YES, {**YES, "name": "solver"}, id="a reply's name"),
        pytest.param(YES, {**YES, "content": [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]}, id="parts"),
        pytest.param(YES, refusal("yes"), id="a refusal as a part"),
        pytest.param(YES, {"role": "assistant", "refusal": "yes"}, id="a refusal as a field"),
        pytest.param(NOTHING, {"role": "assistant"}, id="no content"),
        pytest.param(NOTHING, {"role": "assistant", "content": ""}, id="empty content"),
        pytest.param(call("{}", "call_1"), call("{}", "call_2"), id="a call's id"),
        *(
            pytest.param(call('{"a":1,"b":2}'), call(same), id="arguments")
            for same in ('{"a": 1, "b": 2}', '{"b":2,"a":1}', {"b": 2, "a": 1}, '{"a": 1.0, "b": 2}')
        ),
        *(pytest.param(call("{}"), call(nothing), id="no arguments") for nothing in ("", " ", "null", None)),
    ],
)  # fmt: skip
def test_equal_messages_have_one_digest_however_they_are_written(recorded: Any, received: Any) -> None:
    assert last(USER, recorded) == last(USER, received)


DEEP = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    ("recorded", "received"),
    [
        (refusal("yes"), refusal("never")),
        (RESULT, {**RESULT, "tool_call_id": "call_2"}),
        (call('{"a":1}'), call('{"a":2}')),
        (call('{"a": 1.5}'), call('{"a": 1}')),
        (call("{}"), call("{}", name="sub")),
        (call("not JSON"), call("{}")),
        *((call(f'{{"a": {constant}}}'), call('{"a": null}')) for constant in ("NaN", "Infinity", "1e999")),
        *(
            (call(odd), call('{"a": 1}'))
            for odd in ('{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}', DEEP, '{"a": 1e400}')
        ),
    ],
)
def test_other_arguments_names_or_texts_differ(recorded: Any, received: Any) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    assert last(USER, recorded) == last(USER, recorded)
    assert last(USER, recorded) != last(USER, received)
    assert last(USER, recorded) != last(USER, recorded, tools=[tool])


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


def test_the_digest_is_of_this_form_for_good() -> None:
    """Digests are stored: another build must find the same ones."""
    assert [digest.hex() for digest in digests([USER], [])] == [
        "7ebb3c7c2a87b1a2f8a7ed729ecb040d",
        "00df10d110714a5acbef3de958fd4bd0",
    ]
