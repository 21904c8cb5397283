"""Tokens as text, one at a time, without ever splitting a character. The hot path: called once for every token.

A byte-level tokenizer's token is the same bytes wherever it stands, so its text comes from a table (`TokenTexts`) and
only unfinished characters wait. For any other tokenizer, the tokenizer itself decodes (`DecodeStream`). Both give the
text that decoding all tokens together gives.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

from tokenizers.decoders import DecodeStream

Step = Callable[[int], str]
"""Takes a token and returns the text that is complete so far."""

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """One tokenizer's bytes of every token, filled as they are met. Entries never change, so threads may share it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        parts = {part["type"]: part for part in decoder.get("decoders", [])}
        self._byte_level = decoder.get("type") == "ByteLevel"
        pieces = "ByteFallback" in parts and parts.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        self.strip = parts["Strip"]["start"] if "Strip" in parts else 0
        """Spaces that do not count at the beginning of a run of text."""
        self.independent: bool = self._byte_level or pieces
        """True if a token's bytes do not depend on its neighbors."""
        self.known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Return a token's bytes; none for an id that has no token."""
        known = self.known.get(token)
        if known is None:
            text = self._backend.id_to_token(token) or ""
            known = self.known[token] = _level_bytes(text) if self._byte_level else _piece_bytes(text)
        return known

    def stream(self) -> TextStream:
        """Return a decoder for one run of text."""
        return TextStream(self._backend, self)


class TextStream:
    """One run of tokens as text. `step` each token, then `end` once."""

    def __init__(self, backend: Any, texts: TokenTexts) -> None:
        self.step: Step
        self._finish: Callable[[], str]
        if texts.independent:
            self._by_bytes(texts)
        else:
            self._by_decoding(backend)

    def _by_bytes(self, texts: TokenTexts) -> None:
        decode, of, get = _Utf8("replace").decode, texts.of, texts.known.get
        self._finish = lambda: decode(b"", True)

        def step(token: int) -> str:
            return decode(get(token) or of(token))

        begun = False

        def first(token: int) -> str:
            nonlocal begun
            text = step(token)
            if begun or not text:
                return text
            begun = True
            return text[min(texts.strip, len(text) - len(text.lstrip(" "))) :]

        self.step = first if texts.strip else step

    def _by_decoding(self, backend: Any) -> None:
        stream, shown = DecodeStream(skip_special_tokens=False), 0
        ids: list[int] = []

        def step(token: int) -> str:
            nonlocal stream, shown
            try:
                text = stream.step(backend, token)
            except Exception:  # the token changes text that was sent already
                stream, text = DecodeStream(skip_special_tokens=False), end() + backend.decode([token])
                ids.clear()
                shown = 0
                return text
            ids.append(token)
            shown += len(text or "")
            return text or ""

        def end() -> str:
            return backend.decode(ids, skip_special_tokens=False)[shown:] if ids else ""

        self.step, self._finish = step, end

    def end(self) -> str:
        """Return the rest: bytes of a character that never became complete, as replacement characters."""
        return self._finish()


def _byte_alphabet() -> dict[str, int]:
    """Return the characters by which byte-level tokenizers write bytes: themselves where they can be seen, else from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _level_bytes(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def _piece_bytes(token: str) -> bytes:
    """Return a piece in SentencePiece's form: text with visible spaces, or one byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
