"""Conversations that extend recorded tokens and those that must not; and the cost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelSettings
from gateway.render.renderer import ChatRenderer
from headgate.errors import BadRequest
from tests.families.conversation import TOOLS, Episode, Reply, results
from tests.families.family import FAMILIES, named, renderer, save

ALL = [family.name for family in FAMILIES]
APPENDING = [
    "qwen2.5",
    "llama3",
    "llama3 (library)",
    "mistral v7",
    "phi4-mini",
    "qwen3, thinking off (library)",
]
"""Families whose templates only append in conversations without thinking, tools included."""
THINKING = ["qwen3", "qwen3 (library)", "glm4.5", "glm4.5 (library)"]
USER = {"role": "user", "content": "hi"}
LOOK = (("look", "é"),)


def last_is_bridged(
    name: str, *turns: Reply, tools: bool = False, then: str = "user", system: bool = False
) -> bool:
    """Return True if the call after these turns extends the recorded tokens."""
    episode = Episode(named(name), TOOLS if tools else ())
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if system else []
    messages.append(USER)
    for turn in turns:
        reply = episode.ask(messages, turn)
        messages = [*messages, reply, *results(reply)]
        if messages[-1]["role"] != "tool":
            messages.append({"role": then, "content": "and?"})
    episode.ask(messages, Reply("end"))
    last = episode.calls[-1]
    assert last.history is not None, "the conversation was not recognized"
    return last.bridged


@pytest.mark.parametrize("name", APPENDING)
def test_a_template_that_only_appends_keeps_every_prefix(name: str) -> None:
    reply = Reply("" if "llama" in name else "let me see", calls=LOOK)
    assert last_is_bridged(name, Reply("hello"))
    assert last_is_bridged(name, Reply("hello"), Reply("and so on"), system=True)
    assert last_is_bridged(name, reply, tools=True)
    assert last_is_bridged(name, reply, Reply("hello"), reply, Reply("hello"), tools=True, system=True)


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_kept_within_a_cycle_of_tools_and_dropped_by_a_user(name: str) -> None:
    assert last_is_bridged(name, Reply("", "hm", LOOK), tools=True)
    assert last_is_bridged(name, Reply("", "hm", LOOK), Reply("", "well", LOOK), tools=True)
    assert not last_is_bridged(name, Reply("hello", "hm"))
    assert not last_is_bridged(name, Reply("", "hm", LOOK), Reply("hello"), tools=True)


@pytest.mark.parametrize("name", ["deepseek r1", "deepseek v3"])
def test_a_template_that_opens_thinking_and_never_shows_it_again_is_never_continued(name: str) -> None:
    assert not last_is_bridged(name, Reply("hello", "hm"))


@pytest.mark.parametrize("name", ["qwen2.5", "gemma3"])
def test_a_later_system_message_continues_what_was_recorded(name: str) -> None:
    """Gemma's template refuses one: it is written as the user's."""
    assert last_is_bridged(name, Reply("hello"), then="system")


def test_a_system_message_that_moves_makes_a_branch() -> None:
    assert last_is_bridged("mistral v3", Reply("hello"))
    assert not last_is_bridged("mistral v3", Reply("hello"), system=True)
    assert not last_is_bridged("mistral v3", Reply("hello"), tools=True)
    assert last_is_bridged("mistral v3", Reply("", calls=LOOK), tools=True, system=True)


@pytest.mark.parametrize(
    "name", ["qwen2.5", "llama3", "gemma3", "phi3", "phi4-mini", "glm4.5", "qwen3 (library)"]
)
def test_a_reply_that_was_cut_off_is_closed_as_the_template_closes_it(name: str) -> None:
    chat = renderer(name)
    prompt = chat.render([USER], [])
    whole = chat.render([USER, {"role": "assistant", "content": "hello the"}, USER], [])
    assert whole[: len(prompt)] == prompt
    end = next(i for i in range(len(prompt), len(whole)) if whole[i] in chat.marks.stop)
    cut = np.asarray(whole[:end], np.int32)
    assert chat.bridge(cut, len(prompt), [USER], []) == whole[end:]


@pytest.mark.parametrize(
    "name", ["qwen3 (library)", "glm4.5 (library)", "llama3 (library)", "qwen2.5", "phi4-mini"]
)
@pytest.mark.parametrize(
    "roles",
    [
        ["tool", "system"],
        ["tool", "user"],
        ["user", "system", "user"],
        ["system"],
        ["tool", "assistant", "user"],
    ],
)
def test_new_messages_of_several_roles(name: str, roles: list[str]) -> None:
    episode = Episode(named(name), TOOLS)
    reply = episode.ask(
        [USER], Reply("" if roles[0] == "tool" else "hello", calls=LOOK if roles[0] == "tool" else ())
    )
    new = [{"role": role, "content": "waw", "tool_call_id": "call00000"} for role in roles]
    episode.ask([USER, reply, *new], Reply("end"))
    assert episode.calls[-1].history is not None
    assert episode.calls[-1].prompt.tolist() == episode.calls[-1].whole


@pytest.mark.parametrize("name", ["qwen3", "qwen3 (library)", "glm4.5"])
def test_a_reply_that_was_cut_off_in_thought_is_not_continued(name: str) -> None:
    chat = renderer(name)
    prompt = chat.render([USER], [])
    cut = np.asarray([*prompt, *chat.encode("<think>\nhm")], np.int32)
    assert chat.bridge(cut, len(prompt), [USER], []) is None


def test_a_mark_of_thinking_where_it_means_nothing_makes_a_branch() -> None:
    chat = renderer("qwen3")
    prompt = chat.render([USER], [])
    sampled = chat.encode("yes</think>no<|im_end|>")
    assert chat.bridge(np.asarray([*prompt, *sampled], np.int32), len(prompt), [USER], []) is None


NOTE = {"role": "assistant", "content": "the limit of steps is reached"}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("new", [[NOTE], [NOTE, USER], [USER, NOTE, USER]], ids=len)
def test_a_message_in_the_models_name_is_appended_as_the_template_writes_it_or_makes_a_branch(
    name: str, new: list[dict[str, Any]]
) -> None:
    chat = renderer(name)
    prompt = chat.render([USER], [])
    try:
        whole = chat.render([USER, {"role": "assistant", "content": "hello"}, *new], [])
    except BadRequest:  # two messages of one role
        whole = []
    history = np.asarray([*prompt, *chat.encode("hello"), closing(chat)], np.int32)
    added = chat.bridge(history, len(prompt), new, [])
    assert added is None or [*history.tolist(), *added] == whole
    assert name not in APPENDING or "mistral" in name or added is not None
    assert chat.bridge(history, len(prompt), [], []) is None


def test_a_role_that_the_template_does_not_have_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="cannot be rendered"):
        renderer("gemma3").render([USER, USER], [])


class Counting:
    """A `tokenizers.Tokenizer` that counts the characters it is given."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._backend.encode(text, **options)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@contextmanager
def counted(chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Yield the characters that are given to the tokenizer, by the library's way and by ours."""
    counting = Counting(chat.backend)
    with monkeypatch.context() as patch:
        patch.setattr(chat, "backend", counting)
        patch.setattr(chat._tokenizer, "backend_tokenizer", counting)
        yield counting


@pytest.mark.parametrize("name", APPENDING)
def test_a_long_conversation_costs_at_each_turn_what_is_new(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, turns = renderer(name), 200
    history = np.asarray(chat.render([{"role": "system", "content": "s" * 2000}, USER], []), np.int32)
    reply = [*chat.encode("hello"), closing(chat)]
    chat.bridge(
        np.asarray([*history, *reply], np.int32), len(history), [USER], []
    )  # what is found out only once
    for turn in range(turns):
        sampled_from = len(history)
        history = np.concatenate([history, np.asarray(reply, np.int32)])
        new = [{"role": "user", "content": f"and {turn}? " * (turn % 7)}]
        with counted(chat, monkeypatch) as counting:
            added = chat.bridge(history, sampled_from, new, [])
        assert added is not None
        assert len(new[0]["content"]) <= counting.characters <= len(new[0]["content"]) + 200
        history = np.concatenate([history, np.asarray(added, np.int32)])


def closing(chat: ChatRenderer) -> int:
    """Return the token with which the template closes a reply."""
    whole = chat.render([USER, {"role": "assistant", "content": "hello"}, USER], [])
    start = len(chat.render([USER], []))
    return next((token for token in whole[start:] if token in chat.marks.stop), min(chat.marks.stop))


@pytest.mark.parametrize("name", ["qwen3", "qwen3 (library)", "llama3", "gemma3"])
def test_a_renderer_serves_several_threads_concurrently(name: str) -> None:
    chat = renderer(name)
    conversations = [[{"role": "user", "content": f"é{i} " * (50 + i)}] for i in range(16)]
    expected = [chat.render(messages, []) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda m: chat.render(m, []), conversations)) == expected


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NUMBERED = HEAD.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}")
SHORTENED = HEAD.replace(
    "{{ m.content }}", "{{ m.content[:3] if m.role == 'assistant' and not loop.last else m.content }}"
)
REMINDED_OF_THE_LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    + HEAD.replace("<|im_end|>", "{{ ' (last)' if loop.index0 == ns.last }}<|im_end|>")
)
QUOTING = HEAD.replace("{{ m.role }}", "{{ m.role }}{{ ' to ' ~ messages[0].content if m.role == 'user' }}")
ENDED = HEAD + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
DATED = "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n" + HEAD


@pytest.mark.parametrize(
    ("template", "bridged"),
    [
        pytest.param(HEAD + GENERATION, True, id="appends"),
        pytest.param(ENDED + GENERATION, True, id="ends a conversation with a token"),
        pytest.param(DATED + GENERATION, True, id="has the date"),
        pytest.param(NUMBERED + GENERATION, False, id="numbers the messages"),
        pytest.param(SHORTENED + GENERATION, False, id="shortens earlier replies"),
        pytest.param(REMINDED_OF_THE_LAST_USER + GENERATION, False, id="marks the last user message"),
        pytest.param(
            HEAD + GENERATION.replace("assistant", "assistant {{ messages|length }}"), False, id="counts"
        ),
        pytest.param(QUOTING + GENERATION, False, id="quotes the first"),
        pytest.param(HEAD.replace("<|im_end|>", "END") + GENERATION, False, id="closes a reply with text"),
        pytest.param(
            HEAD.replace("{{ m.content }}", "> {{ m.content }}") + GENERATION, False, id="quotes replies"
        ),
    ],
)
@pytest.mark.parametrize("system", [False, True])
def test_a_template_is_continued_only_where_it_appends(
    tmp_path: Path, template: str, bridged: bool, system: bool
) -> None:
    save(named("qwen2.5"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = ChatRenderer.load(ModelSettings(path=tmp_path, family="template"))
    first = [{"role": "system", "content": "s"}] * system + [USER]
    prompt = chat.render(first, [])
    reply = chat.encode("hello the<|im_end|>")
    added = chat.bridge(np.asarray(prompt + reply, np.int32), len(prompt), [USER], [], system=system)
    assert (added is not None) is bridged
    if added is not None:
        whole = chat.render([*first, {"role": "assistant", "content": "hello the"}, USER], [])
        assert prompt + reply + added == whole
