"""The bytes of a reply's tokens are its text, however the tokens split characters and however they came.

The ground truth is independent: text that is encoded to UTF-8, and the alphabet of byte-level tokenizers that `transformers` has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import ModelSettings
from gateway.dialects.chat import ChatOutput, ChatRequest
from gateway.dialects.logprobs import LogprobAligner, TokenLogprob
from gateway.generation.reply import Choices, Delivery, Reply
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Segmenter
from gateway.render.stops import StopStrings
from tests.families.conversation import TOOLS
from tests.families.family import named, renderer, save

LETTERS = "ab he.lo\n é日🙂ñ<|"
texts = st.text(alphabet=LETTERS, max_size=20)


@cache
def stripping() -> ChatRenderer:
    """Pieces in SentencePiece's form whose decoder takes away a leading space, as Llama 2's."""
    with TemporaryDirectory() as directory:
        save(named("gemma3"), Path(directory))
        path = Path(directory) / "tokenizer.json"
        spec = json.loads(path.read_text())
        spec["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        spec["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spec["normalizer"]],
        }
        path.write_text(json.dumps(spec))
        return ChatRenderer.load(ModelSettings(path=Path(directory), family="template"))


@cache
def asking() -> ChatRenderer:
    """Return a tokenizer whose tokens depend on their neighbors."""
    with TemporaryDirectory() as directory:
        save(named("phi3"), Path(directory))
        path = Path(directory) / "tokenizer.json"
        spec = json.loads(path.read_text())
        spec["decoder"] = {"type": "Sequence", "decoders": [spec["decoder"], {"type": "Fuse"}]}
        path.write_text(json.dumps(spec))
        return ChatRenderer.load(ModelSettings(path=Path(directory), family="template"))


RENDERERS = {
    "bytes": lambda: renderer("qwen3"),
    "pieces": lambda: renderer("gemma3"),
    "stripping": stripping,
    "asking": asking,
    "llama": lambda: renderer("llama3 (library)"),
    "mistral": lambda: renderer("mistral v7"),
}


def delivered(segmenter: Segmenter, ids: Sequence[int], cuts: Sequence[int]) -> list[Delivery]:
    """Return a reply as it is delivered in a stream: tokens go with the next text, and the last ones at the end."""
    found: list[Delivery] = []
    sent, pieces = 0, []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pieces += segmenter.push(ids[start:end])
        if segmenter.stopped:
            break
        if pieces:
            took = segmenter.consumed
            found.append(Delivery(pieces, ids[sent:took], [-1.0] * (took - sent)))
            sent, pieces = took, []
    pieces += segmenter.finish()
    found.append(Delivery(pieces, ids[sent : segmenter.consumed], [-1.0] * (segmenter.consumed - sent)))
    return found


def aligned(chat: ChatRenderer, deliveries: list[Delivery]) -> list[TokenLogprob]:
    aligner = LogprobAligner(chat)
    return [sampled for delivery in deliveries for sampled in aligner.add(delivery)] + aligner.end()


def text_of(deliveries: list[Delivery]) -> str:
    return "".join(piece.text for delivery in deliveries for piece in delivery.pieces)


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=30)
@given(data=st.data())
def test_the_bytes_of_all_tokens_are_the_text(name: str, data: st.DataObject) -> None:
    chat = RENDERERS[name]()
    ids = chat.encode(data.draw(texts)) + ([min(chat.marks.stop)] if data.draw(st.booleans()) else [])
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids))), max_size=8)))
    words = data.draw(st.sampled_from([(), ("he",), ("日", "lo\n"), ("é🙂",)]))
    stop = StopStrings(words) if words else None
    raw = data.draw(st.booleans())
    streamed = delivered(Segmenter(chat, reasoning=False, stop=stop, raw=raw), ids, cuts)
    whole = delivered(Segmenter(chat, reasoning=False, stop=stop, raw=raw), ids, [])
    assert b"".join(sampled.bytes for sampled in aligned(chat, streamed)) == text_of(streamed).encode()
    assert aligned(chat, streamed) == aligned(chat, whole)
    assert [sampled.token for sampled in aligned(chat, streamed)] == [i for d in streamed for i in d.ids]


@settings(max_examples=80)
@given(text=texts)
def test_a_token_has_its_own_bytes_and_stands_where_its_character_begins(text: str) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    chat = renderer("qwen2.5")
    ids = chat.encode(text)
    found = aligned(chat, delivered(Segmenter(chat, reasoning=False), ids, []))
    own = [bytes(alphabet[letter] for letter in chat.backend.id_to_token(token)) for token in ids]
    assert [sampled.bytes for sampled in found] == own
    before = [len(b"".join(own[:i]).decode(errors="ignore")) for i in range(len(own))]
    assert [sampled.offset for sampled in found] == before


REPLIES = [
    "<think>\nhm é\n</think>\n\nso 日",
    "<think>\nhm",
    "so <think> so",
    'so\n\n<tool_call>\n{"name": "look", "arguments": {"text": "so"}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    '<think>a</think><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>name 日',
    "<tool_call>oops é</tool_call> so",
    "so <tool_call>\n{",
]


@pytest.mark.parametrize("text", REPLIES)
@settings(max_examples=12)
@given(data=st.data())
def test_thoughts_are_text_and_marks_and_calls_are_none(text: str, data: st.DataObject) -> None:
    chat = renderer("qwen3")
    ids = [*chat.encode(text), min(chat.marks.stop)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=8)))
    deliveries = delivered(Segmenter(chat, reasoning=False, tools=TOOLS), ids, cuts)
    found = aligned(chat, deliveries)
    assert b"".join(sampled.bytes for sampled in found) == text_of(deliveries).encode()
    assert [sampled.token for sampled in found] == ids


def test_a_piece_keeps_its_leading_space_and_the_first_one_what_the_text_has() -> None:
    chat = stripping()
    ids = chat.encode("a the b")
    deliveries = delivered(Segmenter(chat, reasoning=False), ids, [])
    assert text_of(deliveries) == "a the b"
    assert [sampled.bytes for sampled in aligned(chat, deliveries)][2:5] == [b" t", b"he", b" "]
    assert chat.token_bytes(ids[2]) == b" t"


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_string_cuts_off_is_in_no_bytes_of_a_chat(stream: bool) -> None:
    chat = renderer("qwen3")
    ids = chat.encode("日本 STOP")
    reply = Reply("chatcmpl-1", 0.0, 3, temperature=1.0, top_p=1.0)
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [], "logprobs": True, "top_logprobs": 1, "stream": stream, "stop": " STO"}
    )
    for delivery in delivered(
        Segmenter(chat, reasoning=False, stop=StopStrings((" STO",))), ids, range(1, len(ids))
    ):
        top = [[(token, -1.0)] for token in delivery.ids]
        reply.deliver(reply.compose(delivery.pieces, delivery.ids, delivery.logprobs, top))
    reply.end("stop")
    entries = asyncio.run(logprobs_of(ChatOutput(Choices([reply.read()]), request, chat), stream))
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "日本".encode()
    assert len(entries) == len(ids) - 1
    assert [entry["top_logprobs"][0]["bytes"] for entry in entries[:2]] == [[0xE6], [0x97]]


async def logprobs_of(response: ChatOutput, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return list((await response.complete())["choices"][0]["logprobs"]["content"])
    events = b"".join([part async for part in response.events()]).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    return [
        entry
        for c in chunks
        for choice in c["choices"]
        for entry in (choice["logprobs"] or {}).get("content", [])
    ]


@pytest.mark.parametrize("unusable", [float("-inf"), float("nan"), -1e30])
def test_a_log_probability_is_always_a_number(unusable: float) -> None:
    chat = renderer("qwen3")
    ids = chat.encode("hi")
    pieces = Segmenter(chat, reasoning=False).push(ids)
    aligner = LogprobAligner(chat)
    found = aligner.add(Delivery(pieces, ids, [unusable] * len(ids), [[(ids[0], unusable)]] * len(ids)))
    found += aligner.end()
    assert [(one.logprob, one.alternatives[0][1]) for one in found] == [(-9999.0, -9999.0)] * len(ids)
