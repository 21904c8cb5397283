"""Tokens as text, one at a time, without ever splitting a character. The hot path: called once for every token.

A byte-level tokenizer's token is the same bytes wherever it stands, so its text comes from a table (`TokenTexts`) and only
unfinished characters wait. Any other tokenizer is asked itself (`DecodeStream`). Both say what decoding all tokens together says.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

from tokenizers.decoders import DecodeStream

Step = Callable[[int], str]
"""Takes a token, answers the text that is whole by now."""

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """One tokenizer's bytes of every token, filled as they are met. Entries never change, so threads may share it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        self.byte_level: bool = decoder.get("type") == "ByteLevel"
        """Whether a token's bytes do not depend on its neighbours."""
        self._bytes: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """A token's bytes; none for an id that has no token."""
        known = self._bytes.get(token)
        if known is None:
            text = self._backend.id_to_token(token)
            known = self._bytes[token] = b"" if text is None else _token_bytes(text)
        return known

    def stream(self) -> TextStream:
        """A decoder for one run of text."""
        return TextStream(self._backend, self if self.byte_level else None)


class TextStream:
    """One run of tokens as text. `step` each token, then `end` once."""

    def __init__(self, backend: Any, texts: TokenTexts | None) -> None:
        self._texts = texts
        if texts is not None:
            decode, of = _Utf8("replace").decode, texts.of
            known = texts._bytes
            self._finish = lambda: decode(b"", True)

            def step(token: int) -> str:
                return decode(known.get(token) or of(token))
        else:
            stream, ids, said = DecodeStream(skip_special_tokens=False), [], [0]
            advance = stream.step

            def step(token: int) -> str:
                ids.append(token)
                text = advance(backend, token)
                if not text:
                    return ""
                said[0] += len(text)
                return text

            self._finish = lambda: backend.decode(ids, skip_special_tokens=False)[said[0] :] if ids else ""
        self.step: Step = step

    def end(self) -> str:
        """What is left: bytes of a character that never became whole, as replacement characters."""
        return self._finish()


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: themselves where they can be seen, else from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()
