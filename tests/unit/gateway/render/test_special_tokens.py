"""Text from outside never becomes a control token, and is the same text as ever.

The ground truth is independent: the setting `allow` renders and encodes as the tokenizer and the template do by themselves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ModelSettings, RenderSettings
from gateway.render.renderer import FAMILIES as LIBRARY
from gateway.render.renderer import ChatRenderer, Message, Tool
from gateway.render.special_tokens import ControlTokens
from headgate.errors import BadRequest
from tests.families.family import FAMILIES, Family, named, renderer, save

MORE = {"qwen3.5": "qwen3", "qwen3.6": "qwen3", "qwen3.8": "qwen3", "glm-5": "glm4.5", "glm-5.1": "glm4.5"}
"""Families of the library that the others' tests leave out, and whose tokenizer they can have here."""
NAMES = [*(family.name for family in FAMILIES), *MORE, "deepseek-r1"]


def family_of(name: str) -> Family:
    if name == "deepseek-r1":
        return named("deepseek r1")
    family = named(MORE.get(name, name))
    vision = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return replace(family, specials=(*family.specials, *vision)) if name in MORE else family


@cache
def loaded(name: str, special_tokens: Any) -> ChatRenderer:
    family = family_of(name)
    choice = name if name in LIBRARY else family.family
    with TemporaryDirectory() as directory:
        save(family, Path(directory))
        model = ModelSettings(path=Path(directory), family=choice, thinking=family.thinking)
        return ChatRenderer.load(model, RenderSettings(special_tokens=special_tokens))


def control_of(chat: ChatRenderer) -> dict[str, int]:
    """Every added token of the vocabulary by its text."""
    return {token.content: i for i, token in chat.backend.get_added_tokens_decoder().items()}


def conversation(family: Family, texts: list[str], *, responded: bool = True) -> list[Message]:
    """Texts at every place that a family's template reads."""
    one, two, three, four, five = (texts * 5)[:5]
    # A letter at the end of the key: the template's own `>` after it would complete a mark in the plain rendering
    function = {"name": "look", "arguments": {"text": one, f"k{two}k": [two]}}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: list[Message] = [{"role": "system", "content": one}] if family.systems else []
    messages += [{"role": "user", "content": two}]
    reply: Message = {"role": "assistant", "content": three}
    if family.thinks:
        reply["reasoning_content"] = four
    messages += [reply, {"role": "user", "content": four}]
    if family.tools:
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": five, "tool_call_id": "call00000", "name": "look"}]
    messages += (
        [{"role": "assistant", "content": five}, {"role": "user", "content": one}] if responded else []
    )
    return messages


def tools_with(text: str) -> list[Tool]:
    parameters = {"type": "object", "properties": {f"a{text}": {"type": "string", "description": text}}}
    return [{"type": "function", "function": {"name": "look", "description": text, "parameters": parameters}}]


def counted(ids: list[int], control: set[int]) -> list[int]:
    return [token for token in ids if token in control]


words = st.text(alphabet="ab he.l\n\"'{}é日🙂<>|/", max_size=8)


def spelling(chat: ChatRenderer) -> st.SearchStrategy[str]:
    marks = st.sampled_from(sorted(control_of(chat)))
    halves = st.builds(lambda mark, at: mark[: at % len(mark)], marks, st.integers(0, 30))
    return st.lists(st.one_of(marks, halves, words), max_size=5).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_what_is_spelled_is_text_and_nothing_else_changes(name: str, data: st.DataObject) -> None:
    chat, plain, family = loaded(name, "text"), loaded(name, "allow"), family_of(name)
    texts = data.draw(st.lists(spelling(plain), min_size=5, max_size=5))
    tools = tools_with(texts[0]) if family.tools and data.draw(st.booleans()) else []
    messages = conversation(family, texts)
    ids, today = chat.render(messages, tools), plain.render(messages, tools)
    assert chat.decode(ids) == plain.decode(today)
    clean = conversation(family, [_without_marks(text, plain) for text in texts])
    tools = tools_with(_without_marks(texts[0], plain)) if tools else []
    control = set(control_of(plain).values()) - {plain.marks.think_start, plain.marks.think_end}
    unchanged = plain.render(clean, tools)
    assert counted(ids, control) == counted(unchanged, control)
    assert chat.render(clean, tools) == unchanged, "text without marks is encoded as ever"


@pytest.mark.parametrize("name", ["qwen3.6", "qwen3.8"])
def test_a_mark_that_a_key_and_the_template_spell_together_is_text(name: str) -> None:
    chat, control = loaded(name, "text"), set(control_of(loaded(name, "text")).values())

    def rendered(key: str) -> list[int]:
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {key: ""}}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return counted(chat.render(messages, []), control)

    assert rendered("k<|im_end|") == rendered("k")


def _without_marks(text: str, chat: ChatRenderer) -> str:
    """Letters in the place of every mark; what is left is as it was at both ends."""
    for mark in sorted(control_of(chat), key=len, reverse=True):
        text = text.replace(mark, "x" * len(mark))
    return text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(data=st.data())
def test_extending_is_rendering_where_text_spells_control_tokens(name: str, data: st.DataObject) -> None:
    chat, plain, family = loaded(name, "text"), loaded(name, "allow"), family_of(name)
    texts = data.draw(st.lists(spelling(plain), min_size=3, max_size=3))
    texts = [f"x{text}x" for text in texts]
    system = family.systems and data.draw(st.booleans())
    before: list[Message] = [{"role": "system", "content": texts[0]}] if system else []
    before += [{"role": "user", "content": texts[1]}]
    reply: Message = {"role": "assistant", "content": "a b"}
    after: list[Message] = [{"role": "user", "content": texts[2]}]
    if family.tools and data.draw(st.booleans()):
        function = {"name": "look", "arguments": {"text": "a"}}
        reply = {
            **reply,
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        }
        after = [{"role": "tool", "content": texts[2], "tool_call_id": "call00000", "name": "look"}]
    tools = tools_with("d") if "tool_calls" in reply else []
    prompt, whole = chat.render(before, tools), chat.render([*before, reply, *after], tools)
    if whole[: len(prompt)] != prompt:
        return
    end = next((i for i in range(len(prompt), len(whole)) if whole[i] in chat.marks.stop), None)
    if end is None:
        return
    history = np.asarray(whole[: end + 1], np.int32)
    added = chat.bridge(history, len(prompt), after, tools, system=system)
    assert added is None or [*history.tolist(), *added] == whole
    ends = plain.bridge(history, len(prompt), [{**after[0], "content": "xx"}], tools, system=system)
    assert (added is None) == (ends is None)


@pytest.mark.parametrize("name", NAMES)
def test_no_message_opens_the_reply_s_reasoning(name: str) -> None:
    family = family_of(name)
    tools = tools_with("d") if family.tools else []
    for responded, special_tokens in product((True, False), ("text", "allow")):
        chat = loaded(name, special_tokens)
        clean = conversation(family, ["a", "b", "c", "d", "e"], responded=responded)
        expected = chat.reasoning_open(chat.render(clean, tools)[-8:])
        for text in ("<think>", "hi <think>", "<think>\n", "[THINK]"):
            messages = [*clean[:-1], {**clean[-1], "content": text}]
            ids = chat.render(messages, tools)
            assert chat.reasoning_open(ids[-8:]) == chat.reasoning_open(ids) == expected


def test_allow_is_what_the_tokenizer_does() -> None:
    chat = loaded("qwen3", "allow")
    ids = chat.render([{"role": "user", "content": "x<|im_end|>"}], [])
    assert ids.count(control_of(chat)["<|im_end|>"]) == 2


def test_a_prompt_that_the_caller_wrote_itself_may_have_control_tokens() -> None:
    chat = loaded("qwen3", "text")
    assert chat.encode("<|im_end|>") == [control_of(chat)["<|im_end|>"]]


def test_runs_of_whitespace_and_words_of_the_vocabulary_are_no_control_tokens(tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    save(named("gemma3"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer.backend_tokenizer.add_tokens(
        [AddedToken("\n\n", normalized=False), AddedToken("ll", normalized=False)]
    )
    control = ControlTokens(tokenizer, as_text=True)
    assert control.texts == {"<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}
    text = "hello\n\nthe <b>"
    assert control.encode(text) == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def with_template(family: str, folder: Path, template: str) -> ChatRenderer:
    """Return a renderer for a family's vocabulary with another template."""
    save(named(family), folder)
    (folder / "chat_template.jinja").write_text(template)
    return ChatRenderer.load(ModelSettings(path=folder, family="template"))


def test_a_template_that_formats_its_tokens_is_given_cut_texts_and_refuses_what_it_does_not_find_there(
    tmp_path: Path,
) -> None:
    chat = with_template(
        "qwen2.5",
        tmp_path,
        "{% for m in messages %}{% set text = m.content.split('<tool_call>')[0] %}"
        "{{ '%s%s%s' | format('<|im_start|>', text, '<|im_end|>') }}{% endfor %}",
    )
    start, end = control_of(chat)["<|im_start|>"], control_of(chat)["<|im_end|>"]
    text = "hi<|im_end|>"
    ids = chat.render([{"role": "user", "content": text}], [])
    assert (ids[0], ids[-1]) == (start, end)
    assert chat.decode(ids[1:-1]) == text
    assert not {start, end} & set(ids[1:-1])
    with pytest.raises(BadRequest, match="special_tokens") as raised:
        chat.render([{"role": "user", "content": "hi<tool_call>"}], [])
    assert raised.value.param == "messages"


def test_a_template_that_puts_its_tokens_together_from_roles_may_look_for_others_in_texts(
    tmp_path: Path,
) -> None:
    """Such a template gets the texts as they are: in texts that were cut it would not find what it looks for."""
    chat = with_template(
        "phi4-mini",
        tmp_path,
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('<|tool_call|>')[0] + '<|end|>' }}{% endfor %}",
    )
    ids = chat.render([{"role": "user", "content": "hi<|end|><|tool_call|>rest"}], [])
    assert chat.decode(ids) == "<|user|>hi<|end|><|end|>"
    control = control_of(chat)
    assert counted(ids, set(control.values())) == [control["<|user|>"], control["<|end|>"]]


def test_parts_of_a_control_token_in_the_template_and_in_a_text_are_no_control_token(tmp_path: Path) -> None:
    chat = with_template(
        "qwen2.5",
        tmp_path,
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n<' + m.content + '|>' + '<|im_end|>' }}{% endfor %}",
    )
    ids = chat.render([{"role": "user", "content": "<tool_call>|im_end"}], [])
    assert chat.decode(ids) == "<|im_start|>user\n<<tool_call>|im_end|><|im_end|>"
    assert counted(ids, set(control_of(chat).values())) == [
        control_of(chat)["<|im_start|>"],
        control_of(chat)["<|im_end|>"],
    ]


def test_thousands_of_control_tokens_are_found_in_one_pass() -> None:
    import time

    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(renderer("qwen3").backend.to_str())
    backend.add_special_tokens([AddedToken(f"<|reserved_{i}|>") for i in range(3000)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    control = ControlTokens(fast, as_text=True)
    text = "<|reserve <|re <a href='x'>" * 40_000
    started = time.process_time()
    assert not control.spelled_in({"content": [text]})
    assert time.process_time() - started < 1.0
    assert control.spelled_in({"content": [text + "<|reserved_2999|>x"]})


def sentence_pieces() -> Any:
    """Return a Unigram vocabulary that has its control tokens as pieces, with a space before the first word alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = ["▁", *map(chr, range(33, 127)), "\n"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in letters)]
    pieces += [("▁the", -3.0), ("ell", -4.0), ("<table>", -1.0)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(
        [AddedToken("<s>"), AddedToken("</s>", rstrip=True), AddedToken("<|x|>", lstrip=True)]
    )
    backend.add_tokens([AddedToken("<table>", normalized=False)])
    return backend


def test_a_token_is_looked_for_in_normalized_text_as_the_tokenizer_does() -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(renderer("qwen3").backend.to_str())
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<stop>", normalized=True)])
    stop = backend.token_to_id("<stop>")
    control = ControlTokens(PreTrainedTokenizerFast(tokenizer_object=backend), as_text=True)
    assert backend.encode("a<STOP>").ids[-1] == stop
    assert control.spelled_in("a<STOP>")
    assert stop not in control.encode("a<STOP>")
    assert not control.spelled_in("a STOP")


@given(data=st.data())
def test_guarded_tokens_are_met_as_plain_ones_are_and_text_never_is_one(data: st.DataObject) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = sentence_pieces()
    control = ControlTokens(PreTrainedTokenizerFast(tokenizer_object=backend), as_text=True)
    assert control.texts == {"<s>", "</s>", "<|x|>"}
    fragments = ["the", " ell", "\n", "  ", "<table>", "a", "<s", "|>"]
    parts = data.draw(st.lists(st.sampled_from([*fragments, *sorted(control.texts)]), max_size=10))
    text = "".join(parts)
    guarded = "".join(control.guard + part if part in control.texts else part for part in parts)
    assert control.plain(guarded) == text
    if not control.spelled_in("".join("\0" if part in control.texts else part for part in parts)):
        assert control.encode(guarded) == backend.encode(text, add_special_tokens=False).ids
    assert not control.ids & set(control.encode(text))
    for length in range(len(text) + 1):
        tail = control.tail(guarded, length)
        assert guarded.endswith(tail)
        assert control.plain(tail) == text[len(text) - length :]
