"""Each family's replies: what its marks mean, token by token, however the tokens come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ModelSettings
from gateway.render.detokenizer import TokenTexts
from gateway.render.formats import TOOL_FORMS
from gateway.render.renderer import FAMILIES as KNOWN
from gateway.render.renderer import ChatRenderer, ToolCall
from gateway.render.segmenter import Piece, Segmenter
from gateway.render.stops import StopStrings
from tests.families.conversation import TOOLS
from tests.families.family import FAMILIES, named, renderer, save

CALLING = [family.name for family in FAMILIES if family.tools]
LOOK = ToolCall("look", '{"text": "é🙂"}')


def play(
    chat: ChatRenderer, ids: Sequence[int], cuts: Sequence[int] = (), **options: Any
) -> tuple[list[Any], Segmenter]:
    """Return the segments produced when the ids arrive in pushes that end at `cuts`; adjacent text of one kind is joined."""
    stop = StopStrings(options.pop("stop", ()))
    segmenter = Segmenter(chat, **{"reasoning": False, "tools": TOOLS, "stop": stop, **options})
    pieces: list[Piece] = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for start, end in itertools.pairwise(bounds):
        pieces += segmenter.push(ids[start:end])
    pieces += segmenter.finish()
    segments: list[Any] = []
    for kind, group in itertools.groupby(pieces, key=lambda piece: piece.kind):
        several = list(group)
        segments += (
            [p.tool_call for p in several]
            if kind == "tool_call"
            else [(kind, "".join(p.text for p in several))]
        )
    return segments, segmenter


def written(name: str, content: str, calls: int) -> list[int]:
    """Return a reply with calls as the family's template writes it, without what closes it."""
    chat = renderer(name)
    example = (
        chat.call_example.replace("headgatenamed", "look").replace('"a"', '"text"').replace(">a<", ">text<")
    )
    example = example.replace("headgateargued", "é🙂")
    return chat.encode(content + "\n".join([example] * calls))


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("by", [1, 3, 1000])
def test_a_call_is_read_as_the_template_writes_it(name: str, by: int) -> None:
    chat = renderer(name)
    assert chat.call_example
    bare = chat.marks.bare_calls
    ids = [*written(name, "" if bare else "so", 1), min(chat.marks.stop)]
    segments, segmenter = play(chat, ids, range(by, len(ids), by))
    assert segments == ([LOOK] if bare else [("content", "so"), LOOK])
    assert segmenter.consumed == len(ids)


@pytest.mark.parametrize(
    "name",
    [n for n in CALLING if named(n).parallel and named(n).template not in ("mistral_v3", "deepseek_v3")],
)
def test_several_calls_and_a_bound_on_them(name: str) -> None:
    chat = renderer(name)
    ids = [*written(name, "", 2), min(chat.marks.stop)]
    assert play(chat, ids)[0] == [LOOK, LOOK]
    segments, segmenter = play(chat, ids, range(1, len(ids)), max_tool_calls=1)
    assert segments == [LOOK]
    assert segmenter.stopped
    assert chat.decode(ids[: segmenter.consumed]).count("look") == 1


def test_a_list_of_calls_in_one_block_is_cut_to_the_bound() -> None:
    for name, text in {
        "mistral v3": '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "look", "arguments": {}}]</s>',
        "phi4-mini": '<|tool_call|>[{"name": "look", "arguments": {}}, {"name": "look", "arguments": {}}]<|/tool_call|>',
    }.items():
        chat = renderer(name)
        call = ToolCall("look", "{}")
        assert play(chat, chat.encode(text))[0] == [call, call]
        segments, segmenter = play(chat, chat.encode(text), max_tool_calls=1)
        assert segments == [call]
        assert segmenter.stopped


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_was_cut_off_is_text(name: str) -> None:
    ids = written(name, "", 1)
    ids = ids[: len(ids) - (12 if named(name).template == "deepseek_v3" else 5)]
    assert play(renderer(name), ids)[0] == [("content", renderer(name).decode(ids))]


@pytest.mark.parametrize("name", ["qwen3", "qwen3 (library)", "llama3"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_makes_a_call_text(name: str, number: str) -> None:
    chat = renderer(name)
    written = chat.call_example.replace('"headgateargued"', number)
    assert number in written
    assert play(chat, [*chat.encode(written), min(chat.marks.stop)])[0] == [("content", written)]


@pytest.mark.parametrize("name", ["llama3", "llama3 (library)"])
@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"name": "unknown", "parameters": {}}', '{"name": "look"', "{not json"]
)
def test_a_bare_object_that_is_no_call_is_text(name: str, text: str) -> None:
    chat = renderer(name)
    assert play(chat, chat.encode(f"{text}<|eot_id|>"))[0] == [("content", text)]
    held = Segmenter(chat, reasoning=False)
    assert "".join(piece.text for token in chat.encode("{a") for piece in held.push([token])) == "{a"


def test_a_bare_call_ends_at_a_stop_string_as_any_text_does() -> None:
    chat = renderer("llama3")
    segments, segmenter = play(chat, chat.encode('{"name": "look", STOP "parameters": {}}'), stop=["STOP"])
    assert segments == [("content", '{"name": "look", ')]
    assert segmenter.stopped


def test_a_python_tag_begins_a_call() -> None:
    chat = renderer("llama3")
    ids = chat.encode('<|python_tag|>{"name": "look", "parameters": {}}<|eot_id|>')
    assert play(chat, ids)[0] == [ToolCall("look", "{}")]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@settings(max_examples=30)
@given(data=st.data())
def test_the_reply_does_not_depend_on_how_the_tokens_arrive(name: str, data: st.DataObject) -> None:
    chat = renderer(name)
    marks = [m for m in vars_of(chat) if m is not None]
    fragments = [
        "hello",
        "\n",
        " ",
        "é",
        "🙂",
        "{",
        '"',
        "STOP",
        "ST",
        chat.call_example.replace("headgatenamed", "look"),
    ]
    parts = data.draw(
        st.lists(
            st.one_of(st.sampled_from(fragments), st.sampled_from(marks), st.integers(0, 250)), max_size=12
        )
    )
    ids = [i for part in parts for i in (chat.encode(part) if isinstance(part, str) else [part])]
    cuts = data.draw(st.lists(st.integers(0, 150), max_size=8))
    options = {
        "reasoning": data.draw(st.booleans()) and chat.think is not None,
        "tools": data.draw(st.sampled_from([[], TOOLS])),
        "stop": data.draw(st.sampled_from([[], ["STOP"], ["o\n", "lo"]])),
        "max_tool_calls": data.draw(st.sampled_from([None, 1])),
    }
    together, whole = play(chat, ids, **options)
    in_pieces, split = play(chat, ids, cuts, **options)
    one_by_one, single = play(chat, ids, range(1, len(ids)), **options)
    assert together == in_pieces == one_by_one
    assert whole.consumed == split.consumed == single.consumed
    assert whole.stopped == split.stopped == single.stopped


def vars_of(chat: ChatRenderer) -> list[int | None]:
    marks = chat.marks
    return [marks.think_start, marks.think_end, marks.tool_start, marks.tool_end, *marks.stop]


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
@given(text=st.text(max_size=30), data=st.data())
def test_text_comes_out_as_it_was(name: str, text: str, data: st.DataObject) -> None:
    chat = renderer(name)
    ids = chat.encode(text)
    segments, _ = play(chat, ids, range(1, len(ids)), tools=[])
    assert segments == ([("content", chat.decode(ids))] if ids else [])


def test_a_byte_that_makes_no_character_leaves_the_text_before_it() -> None:
    chat = renderer("gemma3")
    ids = [*chat.encode("é"), 0x80, *chat.encode("he")]
    assert play(chat, ids, range(1, len(ids)), tools=[])[0] == [("content", "é\ufffdhe")]


def test_a_leading_space_of_pieces_is_stripped_once() -> None:
    from tokenizers import Tokenizer, decoders

    backend = Tokenizer.from_str(renderer("gemma3").backend.to_str())
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    ids = backend.encode("  a the b", add_special_tokens=False).ids
    stream = TokenTexts(backend).stream()
    step = stream.step
    assert "".join([step(token) for token in ids]) + stream.end() == backend.decode(ids) == " a the b"


def test_an_unknown_family_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"qwen3, .*auto, template"):
        ChatRenderer.load(ModelSettings(path=tmp_path, family="qwen4"))


@pytest.mark.parametrize("family", ["auto", "template"])
def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path, family: str) -> None:
    save(named("phi3"), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer.load(ModelSettings(path=tmp_path, family=family))


def test_auto_takes_the_template_where_the_library_knows_no_better(tmp_path: Path) -> None:
    save(named("phi3"), tmp_path)
    chat = ChatRenderer.load(ModelSettings(path=tmp_path, family="auto"))
    assert chat.render([{"role": "user", "content": "hi"}], []) == renderer("phi3").render(
        [{"role": "user", "content": "hi"}], []
    )


def test_marks_that_a_template_does_not_mean_are_text(tmp_path: Path) -> None:
    save(named("qwen2.5"), tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace('{"name": "', "<function="))
    chat = ChatRenderer.load(ModelSettings(path=tmp_path, family="template"))
    assert chat.form is None
    assert play(chat, chat.encode("<tool_call>x</tool_call>"))[0] == [("content", "<tool_call>x</tool_call>")]


def test_every_form_and_every_family_of_the_issue_is_tested() -> None:
    assert {renderer(name).form.name for name in CALLING} == {form.name for form in TOOL_FORMS}
    assert {family.family for family in FAMILIES} - {"template"} <= set(KNOWN)
    assert len({family.template for family in FAMILIES}) >= 8
