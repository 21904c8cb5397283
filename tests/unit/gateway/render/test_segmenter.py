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

FRAGMENTS = [
    *("hello", " ", "\n", "\n\n", "é", "🙂", "日本", "END", "EN", "the END", CALL, CALL.replace("}", "")),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>", "<|im_start|>"),
]

Said = list[tuple[str, str | ToolCall]]


def ids_of(renderer: ChatRenderer, text: str) -> list[int]:
    return renderer.backend.encode(text, add_special_tokens=False).ids


def joined(pieces: Sequence[Piece]) -> Said:
    """Pieces with neighbouring text of one kind made one."""
    said: Said = []
    for piece in pieces:
        if piece.tool_call is not None:
            said.append((piece.kind, piece.tool_call))
        elif said and said[-1][0] == piece.kind:
            said[-1] = (piece.kind, f"{said[-1][1]}{piece.text}")
        else:
            said.append((piece.kind, piece.text))
    return said


def segmented(
    renderer: ChatRenderer, ids: Sequence[int], cuts: Sequence[int] = (), **kwargs: Any
) -> tuple[Said, Segmenter]:
    """The segments produced when the ids arrive in pushes that end at `cuts`."""
    stop = StopStrings(kwargs.pop("stop", ()))
    segmenter = Segmenter(renderer, **{"reasoning": False, "stop": stop, **kwargs})
    pieces: list[Piece] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for start, end in itertools.pairwise(bounds):
        pieces += segmenter.push(ids[start:end])
    pieces += segmenter.finish()
    return joined(pieces), segmenter


def said(renderer: ChatRenderer, text: str, **kwargs: Any) -> Said:
    return segmented(renderer, ids_of(renderer, text), **kwargs)[0]


parts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, 264)), max_size=12)
cuts = st.lists(st.integers(0, 200), max_size=12)


@given(
    parts, cuts, st.booleans(), st.sampled_from([(), TOOLS]), st.lists(st.sampled_from(["END", "lo\n", "🙂"]))
)
def test_the_reply_does_not_depend_on_how_the_tokens_arrive(
    renderer: ChatRenderer,
    parts: list[str | int],
    cuts: list[int],
    reasoning: bool,
    tools: Sequence[Any],
    stop: list[str],
) -> None:
    ids = [i for part in parts for i in (ids_of(renderer, part) if isinstance(part, str) else [part])]
    options = {"reasoning": reasoning, "tools": tools, "stop": stop}
    at_once, whole = segmented(renderer, ids, **options)
    in_pieces, split = segmented(renderer, ids, cuts, **options)
    one_by_one, single = segmented(renderer, ids, range(1, len(ids)), **options)
    assert in_pieces == at_once
    assert one_by_one == at_once
    assert split.consumed == whole.consumed == single.consumed
    assert split.stopped == whole.stopped == single.stopped


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them_all_together(
    renderer: ChatRenderer, ids: list[int]
) -> None:
    text = renderer.decode(ids)
    assert segmented(renderer, ids, range(1, len(ids)))[0] == ([("content", text)] if text else [])


@given(st.text(alphabet="ab\nEND é🙂", max_size=30), st.text(alphabet="ab\nEND é🙂", min_size=1, max_size=4))
def test_a_reply_ends_before_its_first_stop_string_and_with_the_token_that_completed_it(
    renderer: ChatRenderer, text: str, stop: str
) -> None:
    ids = ids_of(renderer, text)
    reply, segmenter = segmented(renderer, ids, range(1, len(ids)), stop=[stop])
    at = text.find(stop)
    kept = text if at < 0 else text[:at]
    assert reply == ([("content", kept)] if kept else [])
    assert segmenter.stopped is (at >= 0)
    completed = len((text[:at] + stop).encode()) if at >= 0 else len(ids)
    assert segmenter.consumed == completed


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_string_is_found_at_every_offset_and_never_leaks(renderer: ChatRenderer, offset: int) -> None:
    before = "x" * offset
    segmenter = Segmenter(renderer, reasoning=False, stop=StopStrings(["STOP"]))
    delivered = ""
    for token in ids_of(renderer, f"{before}STOP and more"):
        delivered += "".join(piece.text for piece in segmenter.push([token]))
        assert "S" not in delivered
    assert delivered == before
    assert segmenter.stopped
    assert segmenter.consumed == offset + 4
    assert segmenter.finish() == []


def test_what_only_looked_like_a_stop_string_is_delivered(renderer: ChatRenderer) -> None:
    assert said(renderer, "STO STOQ STO", stop=["STOP"]) == [("content", "STO STOQ STO")]


def test_the_earliest_of_several_stop_strings_ends_the_reply(renderer: ChatRenderer) -> None:
    assert said(renderer, "one two three", stop=["three", "two"]) == [("content", "one ")]


def test_a_stop_string_across_pushes_gives_back_the_tokens_after_it(renderer: ChatRenderer) -> None:
    ids = ids_of(renderer, "abENDcd")
    reply, segmenter = segmented(renderer, ids, [3, 4], stop=["END"])
    assert reply == [("content", "ab")]
    assert segmenter.consumed == 5


def test_text_is_delivered_at_once_but_never_half_a_character(renderer: ChatRenderer) -> None:
    segmenter = Segmenter(renderer, reasoning=False)
    delivered = [joined(segmenter.push([token])) for token in ids_of(renderer, "aé🙂")]
    assert delivered == [
        *([("content", "a")], [], [("content", "é")]),
        *([], [], [], [("content", "🙂")]),
    ]


def test_a_character_that_never_becomes_whole_is_a_replacement_character(renderer: ChatRenderer) -> None:
    ids = ids_of(renderer, "a🙂")[:-1]
    assert segmented(renderer, ids)[0] == [("content", renderer.decode(ids))]
    assert renderer.decode(ids) == "a�"


def test_thinking_that_the_model_opened(renderer: ChatRenderer) -> None:
    text = "<think>\nhmm\n\nwell\n</think>\n\nyes\n<|im_end|>"
    assert said(renderer, text) == [("reasoning", "hmm\n\nwell"), ("content", "yes\n")]


def test_thinking_that_the_prompt_opened(renderer: ChatRenderer) -> None:
    assert said(renderer, "hmm\n</think>\n\nyes", reasoning=True) == [
        ("reasoning", "hmm"),
        ("content", "yes"),
    ]


def test_thinking_that_never_ends_is_all_reasoning(renderer: ChatRenderer) -> None:
    assert said(renderer, "<think>on and on") == [("reasoning", "on and on")]


def test_empty_thinking_says_nothing(renderer: ChatRenderer) -> None:
    assert said(renderer, "<think>\n\n</think>\n\nyes") == [("content", "yes")]


def test_a_thinking_mark_in_the_middle_of_content_is_text(renderer: ChatRenderer) -> None:
    assert said(renderer, "a <think> b </think> c") == [("content", "a <think> b </think> c")]


def test_a_tool_call_is_held_until_it_is_whole(renderer: ChatRenderer) -> None:
    segmenter = Segmenter(renderer, reasoning=False, tools=TOOLS)
    delivered = [segmenter.push([token]) for token in ids_of(renderer, CALL)]
    assert not any(delivered[:-1])
    assert joined(delivered[-1]) == [("tool_call", ADD_ONE)]
    assert segmenter.finish() == []


def test_whitespace_between_text_and_tool_calls_belongs_to_the_template(renderer: ChatRenderer) -> None:
    text = f"let me see\n\n{CALL}\n{CALL}<|im_end|>"
    calls: Said = [("tool_call", ADD_ONE)] * 2
    assert said(renderer, text, tools=TOOLS) == [("content", "let me see"), *calls]
    ids = ids_of(renderer, text)
    assert segmented(renderer, ids, range(1, len(ids)), tools=TOOLS)[0] == [("content", "let me see"), *calls]


def test_text_after_a_tool_call_is_content(renderer: ChatRenderer) -> None:
    assert said(renderer, f"{CALL}\nthen", tools=TOOLS) == [("tool_call", ADD_ONE), ("content", "then")]


def test_a_tool_call_ends_thinking_that_was_left_open(renderer: ChatRenderer) -> None:
    assert said(renderer, f"<think>\nhmm\n{CALL}", tools=TOOLS) == [
        ("reasoning", "hmm"),
        ("tool_call", ADD_ONE),
    ]


@pytest.mark.parametrize(
    "malformed",
    [
        '<tool_call>{"name": "add", "arguments": </tool_call>',
        "<tool_call>{}</tool_call>",
        "<tool_call></tool_call>",
    ],
)
def test_a_malformed_tool_call_is_given_as_text(renderer: ChatRenderer, malformed: str) -> None:
    assert said(renderer, malformed, tools=TOOLS) == [("content", malformed)]


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_tool_call_that_was_cut_off_is_given_as_text(renderer: ChatRenderer, end: str) -> None:
    cut = '<tool_call>\n{"name": "ad'
    assert said(renderer, f"so\n{cut}{end}", tools=TOOLS) == [("content", f"so{cut}")]


def test_without_tools_a_tool_call_is_text(renderer: ChatRenderer) -> None:
    assert said(renderer, f"a {CALL}") == [("content", f"a {CALL}")]


def test_arguments_keep_their_characters(renderer: ChatRenderer) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"city": "Zürich 🙂"}}</tool_call>'
    assert said(renderer, text, tools=TOOLS) == [("tool_call", ToolCall("add", '{"city": "Zürich 🙂"}'))]


def test_the_token_that_ends_a_turn_is_consumed_and_says_nothing(renderer: ChatRenderer) -> None:
    ids = ids_of(renderer, "yes<|im_end|>")
    reply, segmenter = segmented(renderer, ids)
    assert reply == [("content", "yes")]
    assert segmenter.consumed == 4
    assert not segmenter.stopped
