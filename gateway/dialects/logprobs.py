"""Finds the bytes of a reply's text that each of its tokens gave: clients align log-probabilities with the text by bytes.

A token has its own bytes, also where they are a part of a character. The bytes of all tokens together are the reply's
text, reasoning included. A token that adds no text (it ends the reply or a thought, or belongs to a tool call) has
none, and text that is left out, such as a stop string, belongs to none. A token's bytes are known once its text was
delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from gateway.generation.reply import Delivery
from gateway.render.renderer import ChatRenderer

MIN_LOGPROB = -9999.0
"""Stands for what an engine calls impossible, or has no figure for, as in OpenAI's API and in vLLM's."""


@dataclass(slots=True)
class TokenLogprob:
    """One token of a reply. Log-probabilities are in the precision in which they are recorded."""

    token: int
    logprob: float
    """Never below `MIN_LOGPROB`, nor NaN: a number in JSON."""
    alternatives: Sequence[tuple[int, float]]
    """The likeliest tokens in its place, with their log-probabilities."""
    bytes: bytes = b""
    offset: int = 0
    """The number of characters of text before it; for tokens within one character, before that character."""


@dataclass(slots=True)
class _Group:
    """A run of tokens that ends with a whole character, or a single mark."""

    tokens: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    mark: bool = False


class LogprobAligner:
    """Follows one reply: call `add` with every delivery, in their order, and then `end`."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._texts = renderer.texts
        self._marks = renderer.marks
        self._stream = self._texts.stream()
        self._open = _Group()
        self._waiting: deque[_Group] = deque()
        self._text = ""
        self._position = 0
        """The place in the delivered text from which on no token was found so far."""
        self._offset = 0
        self._calls = 0
        """The number of tool calls that were delivered and whose tokens were not met so far."""
        self._in_call = False

    def add(self, delivery: Delivery) -> list[TokenLogprob]:
        """Add a delivery, and return the tokens whose bytes are known by now."""
        recorded = [_finite(x) for x in np.asarray(delivery.logprobs, np.float32).tolist()]
        top = [[(i, _finite(x)) for i, x in row] for row in delivery.top or [()] * len(recorded)]
        self._text = self._text[self._position :] + "".join([piece.text for piece in delivery.pieces])
        self._position = 0
        self._calls += sum(piece.tool_call is not None for piece in delivery.pieces)
        ready = self._ready(over=False)
        for sampled in map(TokenLogprob, delivery.ids, recorded, top):
            if self._add(sampled):
                ready.append(sampled)
            elif self._waiting:
                ready += self._ready(over=False)
        return ready

    def end(self) -> list[TokenLogprob]:
        """End the reply, and return all tokens that are left."""
        self._end_run()
        return self._ready(over=True)

    def _add(self, sampled: TokenLogprob) -> bool:
        """Add a token; return whether its bytes are known already, as for nearly every token. Otherwise the token waits."""
        if sampled.token in self._marks.control:
            self._end_run()
            self._waiting.append(_Group([sampled], self._renderer.decode([sampled.token]), mark=True))
            return False
        written = self._stream.step(sampled.token)
        if written and not (self._open.tokens or self._waiting or self._in_call):
            own = self._renderer.token_bytes(sampled.token)
            if self._text.startswith(written, self._position) and own.decode(errors="replace") == written:
                sampled.bytes, sampled.offset = own, self._offset
                self._position += len(written)
                self._offset += len(written)
                return True
        self._open.tokens.append(sampled)
        self._open.text = written
        if written:
            self._waiting.append(self._open)
            self._open = _Group()
        return False

    def _end_run(self) -> None:
        """End a run of text: tokens of a character that never became whole form a group of their own."""
        if self._open.tokens:
            self._open.text = self._stream.end()
            self._waiting.append(self._open)
            self._open = _Group()
        self._stream = self._texts.stream()

    def _ready(self, *, over: bool) -> list[TokenLogprob]:
        ready: list[TokenLogprob] = []
        while self._waiting:
            group = self._waiting[0]
            given = self._text_of(group, over=over)
            if given is None:
                break
            self._position += len(given)
            self._divide(group, given)
            ready += self._waiting.popleft().tokens
        return ready

    def _text_of(self, group: _Group, *, over: bool) -> str | None:
        """Return the part of the text that a group gave; None if that is not known yet."""
        text, at, left = self._text, self._position, len(self._text) - self._position
        if self._in_call or not group.text:
            self._in_call = self._in_call and group.tokens[0].token != self._marks.tool_end
            return ""
        for written in (group.text, self._own_text(group)):
            if written and text.startswith(written, at):
                return written
            if not over and not self._calls and left < len(written) and written.startswith(text[at:]):
                return None
        if group.mark:
            if group.tokens[0].token == self._marks.tool_start and self._calls:
                self._in_call, self._calls = True, self._calls - 1
            return ""
        written = group.text if text.startswith(group.text[:1], at) else group.text.lstrip("\n")
        if not over and not self._calls and left < len(written) and written.startswith(text[at:]):
            return None
        same = takewhile(
            lambda pair: pair[0] == pair[1], zip(written, text[at : at + len(written)], strict=False)
        )
        return "".join(letter for letter, _ in same)

    def _own_text(self, group: _Group) -> str:
        """Return a group's text as it would be in the middle of a text, where a leading space counts."""
        return b"".join(self._renderer.token_bytes(s.token) for s in group.tokens).decode(errors="replace")

    def _divide(self, group: _Group, given: str) -> None:
        """Divide the bytes that a group gave among its tokens."""
        for sampled in group.tokens:
            sampled.offset = self._offset
        self._offset += len(given)
        own = [self._renderer.token_bytes(s.token) for s in group.tokens] if self._texts.independent else []
        whole = b"".join(own)
        if own and whole.decode(errors="replace") == given:
            start, end = 0, len(whole)
        elif (start := whole.find(given.encode())) >= 0 and given:
            end = start + len(given.encode())
        else:
            group.tokens[-1].bytes = given.encode()
            return
        at = 0
        for sampled, part in zip(group.tokens, own, strict=True):
            sampled.bytes = part[max(0, start - at) : max(0, end - at)]
            at += len(part)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > MIN_LOGPROB else MIN_LOGPROB


def entries(tokens: Iterable[TokenLogprob], renderer: ChatRenderer, top: int) -> list[dict[str, Any]]:
    """Return log-probabilities in OpenAI's form, for chat completions and responses."""
    return [
        {
            **_entry(renderer, sampled.token, sampled.logprob, sampled.bytes),
            "top_logprobs": [
                _entry(renderer, token, logprob, renderer.token_bytes(token))
                for token, logprob in sampled.alternatives[:top]
            ],
        }
        for sampled in tokens
    ]


def _entry(renderer: ChatRenderer, token: int, logprob: float, own: bytes) -> dict[str, Any]:
    text = renderer.token_bytes(token).decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(own)}
