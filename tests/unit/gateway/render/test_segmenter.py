"""Replies from tokens: what comes out never depends on how the tokens came in."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.render.renderer import ChatRenderer, ToolCall
from gateway.render.segmenter import Piece, Segmenter
from gateway.render.stops import StopStrings

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD_ONE = ToolCall("add", '{"a": 1}')

Segments = list[tuple[str, str | ToolCall]]


def ids_of(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer.backend.encode(text, add_special_tokens=False).ids


def joined(pieces: Sequence[Piece]) -> Segments:
    """Join neighboring text pieces of one kind."""
    found: Segments = []
    for piece in pieces:
        if piece.tool_call is not None:
            found.append((piece.kind, piece.tool_call))
        elif found and found[-1][0] == piece.kind:
            found[-1] = (piece.kind, f"{found[-1][1]}{piece.text}")
        else:
            found.append((piece.kind, piece.text))
    return found


def segmented(
    renderer: ChatRenderer, ids: Sequence[int], cuts: Sequence[int] = (), **kwargs: Any
) -> tuple[Segments, Segmenter]:
    """Return the segments produced when the ids arrive in pushes that end at `cuts`."""
    stop = StopStrings(kwargs.pop("stop", ()))
    segmenter = Segmenter(renderer, **{"reasoning": False, "stop": stop, **kwargs})
    pieces: list[Piece] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for start, end in itertools.pairwise(bounds):
        pieces += segmenter.push(ids[start:end])
    pieces += segmenter.finish()
    return joined(pieces), segmenter


def segments_of(renderer: ChatRenderer, text: str, **kwargs: Any) -> Segments:
    return segmented(renderer, ids_of(renderer, text), **kwargs)[0]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them_all_together(
    renderer: ChatRenderer, ids: list[int]
) -> None:
    text = renderer.decode(ids)
    assert segmented(renderer, ids, range(1, len(ids)))[0] == ([("content", text)] if text else [])


def test_a_stop_string_across_pushes_gives_back_the_tokens_after_it(renderer: ChatRenderer) -> None:
    ids = ids_of(renderer, "abENDcd")
    reply, segmenter = segmented(renderer, ids, [3, 4], stop=["END"])
    assert reply == [("content", "ab")]
    assert segmenter.consumed == 5


def test_text_is_delivered_immediately_but_never_half_a_character(renderer: ChatRenderer) -> None:
    segmenter = Segmenter(renderer, reasoning=False)
    delivered = [joined(segmenter.push([token])) for token in ids_of(renderer, "aé🙂")]
    assert delivered == [*([("content", "a")], [], [("content", "é")]), *([], [], [], [("content", "🙂")])]


CUT = '<tool_call>\n{"name": "ad'
MALFORMED = '<tool_call>{"name": "add", "arguments": </tool_call>'
CITY = '<tool_call>{"name": "add", "arguments": {"city": "Zürich 🙂"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("<think>\nhmm\n\nwell\n</think>\n\nyes\n<|im_end|>", {}, [("reasoning", "hmm\n\nwell"), ("content", "yes\n")]),
        ("hmm\n</think>\n\nyes", {"reasoning": True}, [("reasoning", "hmm"), ("content", "yes")]),
        ("<think>on and on", {}, [("reasoning", "on and on")]),
        ("<think>\n\n</think>\n\nyes", {}, [("content", "yes")]),
        ("a <think> b </think> c", {}, [("content", "a <think> b </think> c")]),
        (f"{CALL}\nthen", {"tools": TOOLS}, [("tool_call", ADD_ONE), ("content", "then")]),
        (f"<think>\nhmm\n{CALL}", {"tools": TOOLS}, [("reasoning", "hmm"), ("tool_call", ADD_ONE)]),
        (MALFORMED, {"tools": TOOLS}, [("content", MALFORMED)]),
        ("<tool_call>{}</tool_call>", {"tools": TOOLS}, [("content", "<tool_call>{}</tool_call>")]),
        ("<tool_call></tool_call>", {"tools": TOOLS}, [("content", "<tool_call></tool_call>")]),
        (f"so\n{CUT}", {"tools": TOOLS}, [("content", f"so{CUT}")]),
        (f"so\n{CUT}<|im_end|>", {"tools": TOOLS}, [("content", f"so{CUT}")]),
        (f"a {CALL}", {}, [("content", f"a {CALL}")]),
        (CITY, {"tools": TOOLS}, [("tool_call", ToolCall("add", '{"city": "Zürich 🙂"}'))]),
    ],
    ids=[
        "thinking", "thinking that the prompt opened", "thinking without an end", "empty thinking", "a mark within content",
        "text after a call", "a call within thinking", "malformed", "no name", "empty", "cut", "cut before the end", "no tools",
        "characters",
    ],
)  # fmt: skip
def test_a_reply_is_thinking_content_and_calls(
    renderer: ChatRenderer, text: str, options: dict[str, Any], expected: Segments
) -> None:
    assert segments_of(renderer, text, **options) == expected


def test_a_tool_call_is_held_until_it_is_whole(renderer: ChatRenderer) -> None:
    segmenter = Segmenter(renderer, reasoning=False, tools=TOOLS)
    delivered = [segmenter.push([token]) for token in ids_of(renderer, CALL)]
    assert not any(delivered[:-1])
    assert joined(delivered[-1]) == [("tool_call", ADD_ONE)]
    assert segmenter.finish() == []


def test_whitespace_between_text_and_tool_calls_belongs_to_the_template(renderer: ChatRenderer) -> None:
    text = f"let me see\n\n{CALL}\n{CALL}<|im_end|>"
    calls: Segments = [("tool_call", ADD_ONE)] * 2
    assert segments_of(renderer, text, tools=TOOLS) == [("content", "let me see"), *calls]
    ids = ids_of(renderer, text)
    assert segmented(renderer, ids, range(1, len(ids)), tools=TOOLS)[0] == [("content", "let me see"), *calls]


def test_the_token_that_ends_a_turn_is_consumed_and_has_no_text(renderer: ChatRenderer) -> None:
    ids = ids_of(renderer, "yes<|im_end|>")
    reply, segmenter = segmented(renderer, ids)
    assert reply == [("content", "yes")]
    assert segmenter.consumed == 4
    assert not segmenter.stopped
