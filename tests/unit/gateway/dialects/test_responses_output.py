"""A response's items and events: the same whatever way its pieces come, and as the SDK types them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.dialects.responses import parse
from gateway.dialects.responses_input import items, messages
from gateway.dialects.responses_output import ResponsesOutput
from gateway.dialects.responses_tools import Toolbox
from gateway.generation.reply import Choices, Reply
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Segmenter
from gateway.trajectories.conversation import digests
from headgate.errors import Unavailable
from tests.harness.open_responses import check_event, check_response

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PARTS = ["Hé ", "llo 🙂", "\n", "a", CALL, "<think>", "</think>", "</tool_call>"]


def reply_of(renderer: ChatRenderer, text: str, cuts: list[int], finish: str = "stop") -> Reply:
    """Return a finished reply, delivered as it is cut; the tokens of a delivery are those since the last one."""
    ids = renderer.encode(text + ("<|im_end|>" if finish == "stop" else ""))
    reply = Reply("resp_00ab", 1000.5, 7, temperature=1.0, top_p=1.0)
    segmenter = Segmenter(renderer, reasoning=False, tools=TOOLS)
    pieces: list[Any] = []
    delivered = 0
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pieces += segmenter.push(ids[start:end])
        if pieces and end != len(ids):
            reply.deliver(reply.compose(pieces, ids[delivered:end], [-0.5] * (end - delivered)))
            pieces, delivered = [], end
    pieces += segmenter.finish()
    reply.deliver(reply.compose(pieces, ids[delivered:], [-0.5] * (len(ids) - delivered)))
    reply.seconds = 0.25
    reply.end(finish)
    return reply


def response_of(reply: Reply, renderer: ChatRenderer, keep: Any = None, **values: Any) -> ResponsesOutput:
    request = parse({"model": "m", "input": "hi", **values})
    toolbox = Toolbox.of(request.tools or (), "refuse")
    return ResponsesOutput(Choices([reply.read()]), request, toolbox, renderer, keep)


def events_of(response: ResponsesOutput) -> list[dict[str, Any]]:
    async def read() -> bytes:
        return b"".join([part async for part in response.events()])

    return parsed(asyncio.run(read()))


def parsed(raw: bytes) -> list[dict[str, Any]]:
    """Return the events, each of which the SDK knows."""
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        typed = EVENT.validate_python(event)
        assert typed.type == event["type"]
        assert typed.model_dump(exclude_unset=True, by_alias=True) == event
        check_event(event)
        found.append(event)
    return found


def check_events(events: list[dict[str, Any]], response: dict[str, Any]) -> None:
    """Assert that events start and end correctly, are in order, and add up to the whole response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1] == {
        "type": f"response.{response['status']}",
        "sequence_number": len(events) - 1,
        "response": response,
    }
    built: list[dict[str, Any]] = []
    open_item = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(built)
            open_item = event["item"]
            assert open_item["status"] == "in_progress"
        elif kind == "output_item.done":
            assert open_item is not None
            done = event["item"]
            assert (done["id"], done["type"]) == (open_item["id"], open_item["type"])
            text = open_item.get("deltas", "")
            if done["type"] == "reasoning":
                summary = [part["text"] for part in done["summary"]]
                assert summary == ([open_item["summarized"]] if "summarized" in open_item else [])
                assert summary in ([], [text])
            assert text == (done["arguments"] if "arguments" in done else done["content"][0]["text"])
            built.append(done)
            open_item = None
        else:
            assert open_item is not None
            assert (event["item_id"], event["output_index"]) == (open_item["id"], len(built))
            if kind == "reasoning_summary_text.delta":
                open_item["summarized"] = open_item.get("summarized", "") + event["delta"]
            elif kind.endswith(".delta"):
                open_item["deltas"] = open_item.get("deltas", "") + event["delta"]
    assert open_item is None
    assert built == response["output"]


@given(data=st.data())
def test_events_and_the_whole_response_are_equal(renderer: ChatRenderer, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS), max_size=8)))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    size = len(renderer.encode(text))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, size)), max_size=6))) if size else []
    logprobs = data.draw(st.booleans())
    values: dict[str, Any] = {"include": ["message.output_text.logprobs"]} if logprobs else {}
    summary = data.draw(st.sampled_from([None, "auto"]))
    values["reasoning"] = {"summary": summary}

    whole = asyncio.run(response_of(reply_of(renderer, text, [], finish), renderer, **values).complete())
    assert Response.model_validate(whole).model_dump(exclude_unset=True, by_alias=True) == whole
    check_response(whole)
    reply = reply_of(renderer, text, cuts, finish)
    events = events_of(response_of(reply, renderer, **values))
    check_events(events, whole)
    assert whole["output"], "there is always an item"
    assert whole["status"] == ("incomplete" if finish == "length" else "completed")
    check_the_way_back(reply, whole)


def test_there_are_no_log_probabilities_from_a_tool_call_on(renderer: ChatRenderer) -> None:
    """Neither when an unopened thought is closed later, nor for any split of the reply into deltas."""
    text = 'Hé <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call></think>Hé '
    values = {"include": ["message.output_text.logprobs"]}
    for cuts in ([], [46], [3, 20, 47]):
        whole = asyncio.run(response_of(reply_of(renderer, text, cuts), renderer, **values).complete())
        texts = [part for item in whole["output"] for part in item.get("content", ())]
        assert [len(part["logprobs"]) for part in texts] == [4, 0]


def check_the_way_back(reply: Reply, whole: dict[str, Any]) -> None:
    """Assert that a client that sends the items back continues the recorded conversation."""
    user = {"role": "user", "content": "hi"}
    recorded = digests([user, reply.message()], TOOLS)
    (again,) = messages(items(whole["output"]))
    assert digests([user, again], TOOLS) == recorded
    assert again.get("reasoning_content") == reply.message().get("reasoning_content")
    assert [call["id"] for call in again.get("tool_calls", ())] == [call["id"] for call in reply.tool_calls]


def kinds(whole: dict[str, Any]) -> list[str]:
    return [item["type"] for item in whole["output"]]


def test_reasoning_a_message_and_calls_are_items_in_their_order(renderer: ChatRenderer) -> None:
    reply = reply_of(renderer, f"<think>\nhm\n</think>\n\nso{CALL}{CALL}", [])
    whole = asyncio.run(response_of(reply, renderer).complete())
    assert kinds(whole) == ["reasoning", "message", "function_call", "function_call"]
    thought, message, *calls = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (thought["summary"], thought["encrypted_content"]) == ([], None)
    assert message["content"] == [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]
    assert [call["call_id"] for call in calls] == [call["id"] for call in reply.tool_calls]
    assert [json.loads(call["arguments"]) for call in calls] == [{"a": 1}, {"a": 1}]
    ids = [item["id"] for item in whole["output"]]
    assert ids == ["rs_00ab_0", "msg_00ab_1", "fc_00ab_2", "fc_00ab_3"]
    assert whole["usage"]["input_tokens"] == 7
    assert whole["usage"]["output_tokens"] == reply.completion_tokens
    reasoning = renderer.encode("<think>\nhm\n</think>")
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len(reasoning)}


@pytest.mark.parametrize("cuts", [[], [3, 9, 12, 20]])
def test_the_logprobs_of_a_message_are_those_of_its_tokens(renderer: ChatRenderer, cuts: list[int]) -> None:
    reply = reply_of(renderer, f"<think>\nhm\n</think>\n\nso so{CALL}", cuts)
    include = ["message.output_text.logprobs"]
    events = events_of(response_of(reply, renderer, include=include))
    (message,) = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert "".join(entry["token"] for entry in message["content"][0]["logprobs"]).strip("\n") == "so so"
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [x for e in deltas for x in e["logprobs"]] == message["content"][0]["logprobs"]


def test_a_reply_that_was_cut_is_incomplete(renderer: ChatRenderer) -> None:
    whole = asyncio.run(response_of(reply_of(renderer, "long", [], "length"), renderer).complete())
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][-1]["status"] == "incomplete"


def test_the_response_repeats_the_request(renderer: ChatRenderer) -> None:
    tool = {"type": "function", "name": "add", "parameters": {}}
    given = {"instructions": "x", "truncation": "auto", "metadata": {"k": "v"}, "max_output_tokens": 9}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    response = response_of(
        reply_of(renderer, "a", []), renderer, tools=[tool], text={"format": form}, **given
    )
    whole = Response.model_validate(asyncio.run(response.complete())).model_dump(by_alias=True)
    assert {name: whole[name] for name in given} == given
    assert whole["tools"][0] | tool == whole["tools"][0]
    assert whole["text"]["format"]["schema"] == {"type": "object"}
    assert (whole["store"], whole["created_at"], whole["id"]) == (True, 1000, "resp_00ab")


def test_the_response_has_the_values_that_were_used(renderer: ChatRenderer) -> None:
    """Effective values appear where the configuration overrides the request and where the request sets none."""
    reply = reply_of(renderer, "a", [])
    reply.temperature, reply.top_p, reply.seconds = 0.5, 0.9, 3.75
    response = response_of(
        reply, renderer, temperature=2.0, presence_penalty=0.5, reasoning={"effort": "low"}
    )
    whole = asyncio.run(response.complete())
    assert (whole["temperature"], whole["top_p"]) == (0.5, 0.9)
    assert (whole["presence_penalty"], whole["frequency_penalty"]) == (0.5, 0.0)
    assert (whole["created_at"], whole["completed_at"]) == (1000, 1004)
    assert whole["reasoning"] == {"effort": "low", "summary": None}
    events = events_of(response_of(reply, renderer))
    assert [e["response"]["completed_at"] for e in events if "response" in e] == [None, None, 1004]
    cut = reply_of(renderer, "a", [], "length")
    assert asyncio.run(response_of(cut, renderer).complete())["completed_at"] is None


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
def test_reasoning_is_also_a_summary_on_request(renderer: ChatRenderer, summary: str) -> None:
    reply = reply_of(renderer, "<think>\nhm well\n</think>\n\nso", [2, 5])
    events = events_of(response_of(reply, renderer, reasoning={"summary": summary}))
    thought = events[-1]["response"]["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm well"}]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm well"}]
    summary_events = [event for event in events if "summary_index" in event]
    assert "".join(event.get("delta", "") for event in summary_events) == "hm well"
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in summary_events]
    assert [kinds[0], *kinds[-2:]] == ["part.added", "text.done", "part.done"]
    assert set(kinds[1:-2]) == {"text.delta"}
    (message,) = messages(items([thought]))
    assert message["reasoning_content"] == "hm well", "once, when both are sent back"


def test_the_response_is_stored_before_it_is_reported_complete(renderer: ChatRenderer) -> None:
    kept: list[dict[str, Any]] = []

    async def run() -> None:
        seen = b""

        async def keep(response: dict[str, Any]) -> None:
            assert b"response.completed" not in seen
            assert b"output_text.delta" in seen
            kept.append(response)

        async for part in response_of(reply_of(renderer, "abc", [1, 2]), renderer, keep).events():
            seen += part
        assert kept == [parsed(seen)[-1]["response"]]

    asyncio.run(run())


def test_a_failure_ends_the_stream_with_an_error_and_a_failed_response(renderer: ChatRenderer) -> None:
    reply = reply_of(renderer, "abc", [1])
    reply.finish_reason, reply.failure = "", Unavailable("gone", retry_after=1.0, code="down")

    async def run() -> None:
        response, seen = response_of(reply, renderer), b""
        with pytest.raises(Unavailable) as raised:  # noqa: PT012
            async for part in response.events():
                seen += part
        events = parsed(seen + response.failure(raised.value))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["error"] == {
            "type": "server_error",
            "code": "down",
            "message": "gone",
            "param": None,
        }
        failed = events[-1]["response"]
        assert (failed["status"], failed["error"]["message"]) == ("failed", "gone")
        assert not any(event["type"] == "response.output_item.done" for event in events)

    asyncio.run(run())
