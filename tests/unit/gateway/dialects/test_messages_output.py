"""Anthropic's form of a reply: whole and streamed are equal, and what is sent back is what was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.messages import MessagesRequest
from gateway.dialects.messages_content import conversation
from gateway.dialects.messages_output import MessagesOutput
from gateway.generation.reply import Choices, Reply
from gateway.render.renderer import ToolCall
from gateway.render.segmenter import Piece
from gateway.trajectories.conversation import digests
from headgate.errors import EngineError

USER = {"role": "user", "content": "hi"}
SHOWN = {"type": "enabled", "budget_tokens": 1024}
ADD = Piece("tool_call", tool_call=ToolCall("add", '{"a": 1}'))


def reply_of(pieces: Sequence[Piece], finish: str | Exception = "stop", stop: str = "") -> Reply:
    """Return a reply that was delivered piece by piece, a token each."""
    reply = Reply("msg_1", 0.0, 7, temperature=1.0, top_p=1.0)
    for piece in pieces:
        reply.deliver(reply.compose([piece], [1], [-1.0]))
    reply.deliver(reply.compose([], [2], [-1.0]))
    reply.matched_stop = stop
    reply.end(finish)
    return reply


def response_of(reply: Reply, thinking: Any = None, max_tokens: int = 1000) -> MessagesOutput:
    values = {"model": "m", "max_tokens": max_tokens, "messages": [USER], "thinking": thinking}
    return MessagesOutput(Choices([reply.read()]), MessagesRequest.model_validate(values))


def assembled(data: bytes) -> dict[str, Any]:
    """Return a message put together from its events, each of which must be where it may be."""
    message: dict[str, Any] = {}
    inputs = ""
    ended = [False, False]
    for event in data.decode().split("\n\n")[:-1]:
        name, line = event.split("\n")
        value = json.loads(line.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] == "message_start":
            assert not message
            message = value["message"]
        elif value["type"] == "content_block_start":
            assert value["index"] == len(message["content"])
            message["content"].append(value["content_block"])
            ended[0], inputs = True, ""
        elif value["type"] == "content_block_delta":
            assert ended[0]
            assert value["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], value["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] += delta["signature"]
                case "input_json_delta":
                    inputs += delta["partial_json"]
        elif value["type"] == "content_block_stop":
            assert value["index"] == len(message["content"]) - 1
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(inputs)
            ended[0] = False
        elif value["type"] == "message_delta":
            assert not ended[0]
            message |= {**value["delta"], "usage": value["usage"]}
        else:
            assert value == {"type": "message_stop"}
            ended[1] = True
    assert ended == [False, True]
    return message


async def streamed(response: MessagesOutput) -> bytes:
    return b"".join([part async for part in response.events()])


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
objects = st.dictionaries(st.text(max_size=4), st.integers(-9, 9) | st.text(max_size=4) | st.booleans())
calls = st.builds(ToolCall, st.sampled_from(["add", "sub"]), objects.map(json.dumps))
pieces_ = st.lists(
    st.one_of(
        texts.map(lambda text: Piece("reasoning", text)),
        texts.map(lambda text: Piece("content", text)),
        calls.map(lambda call: Piece("tool_call", tool_call=call)),
    ),
    max_size=8,
)
thinking_ = st.sampled_from(
    [None, {"type": "disabled"}, SHOWN]
    + [{"type": "adaptive", "display": display} for display in (None, "summarized", "omitted", "updates")]
)


@given(pieces_, thinking_)
async def test_whole_and_streamed_are_the_same(pieces: list[Piece], thinking: Any) -> None:
    reply = reply_of(pieces)
    whole = await response_of(reply, thinking).complete()
    assert assembled(await streamed(response_of(reply, thinking))) == whole
    assert whole["usage"]["output_tokens"] == len(pieces) + 1
    shown = thinking is not None and thinking["type"] != "disabled"
    has_thoughts = any(block["type"] == "thinking" for block in whole["content"])
    assert has_thoughts == (shown and any(piece.kind == "reasoning" for piece in pieces))


@given(pieces_, thinking_)
async def test_what_is_sent_back_is_what_was_recorded(pieces: list[Piece], thinking: Any) -> None:
    reply = reply_of(pieces)
    whole = await response_of(reply, thinking).complete()
    recorded = digests([USER, reply.message()], [])
    assert (
        digests(conversation(None, [USER, {"role": "assistant", "content": whole["content"]}]), [])
        == recorded
    )
    one_by_one = [{"role": "assistant", "content": [block]} for block in whole["content"]]
    if one_by_one:
        assert digests(conversation(None, [USER, *one_by_one]), []) == recorded


async def test_blocks_in_their_order() -> None:
    pieces = [Piece("reasoning", "h"), Piece("reasoning", "m"), Piece("content", "so"), ADD, ADD]
    whole = await response_of(reply_of(pieces, "tool_calls"), SHOWN).complete()
    signature = whole["content"][0].pop("signature")
    assert signature
    ids = [block.pop("id") for block in whole["content"][2:]]
    assert len({*ids}) == 2
    use = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "so"},
        use,
        use,
    ]
    assert whole["stop_reason"] == "tool_use"
    other = reply_of(pieces)
    other.call_id = "msg_2"
    assert (await response_of(other, SHOWN).complete())["content"][0]["signature"] != signature


@pytest.mark.parametrize(
    ("finish", "stop", "max_tokens", "expected"),
    [
        ("stop", "", 9, ("end_turn", None)),
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("tool_calls", "", 9, ("tool_use", None)),
        ("length", "", 2, ("max_tokens", None)),
        ("length", "", 3, ("model_context_window_exceeded", None)),
    ],
)
async def test_why_it_ended(
    finish: str, stop: str, max_tokens: int, expected: tuple[str, str | None]
) -> None:
    response = await response_of(
        reply_of([Piece("content", "x")], finish, stop), max_tokens=max_tokens
    ).complete()
    assert (response["stop_reason"], response["stop_sequence"]) == expected


async def test_arguments_that_are_no_object_break_no_client() -> None:
    for arguments in ("[1]", "five", "NaN"):
        reply = reply_of([Piece("tool_call", tool_call=ToolCall("add", arguments))])
        whole = await response_of(reply).complete()
        assert whole["content"][0]["input"] == {"raw_arguments": arguments}
        assert assembled(await streamed(response_of(reply))) == whole


async def test_a_failure_is_raised_and_no_end_is_sent() -> None:
    reply = reply_of([Piece("content", "x")], EngineError("broken"))
    events = response_of(reply).events()
    sent = await anext(events)
    assert b"text_delta" in sent
    assert b"_stop" not in sent
    with pytest.raises(EngineError):
        await anext(events)
