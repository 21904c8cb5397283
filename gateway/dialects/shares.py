"""Which bytes of a reply's text each of its tokens gave: for log-probabilities, which clients align with the text by bytes.

A token has its own bytes, also where they are a part of a character. Together the bytes of all tokens are the reply's text,
reasoning included: a token that is no text (it ends the reply, or a thought, or belongs to a tool call) has none, and neither has
what is left out of the text, such as a stop string. What a token gives is told once that text has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from gateway.render.renderer import ChatRenderer
from gateway.rollout.reply import Delivery


@dataclass(slots=True)
class Share:
    """One token of a reply. Log-probabilities are in the precision in which they are recorded."""

    token: int
    logprob: float
    others: Sequence[tuple[int, float]]
    """The likeliest tokens."""
    own: bytes = b""
    offset: int = 0
    """Characters of text before it; of tokens within one character: before that."""


@dataclass(slots=True)
class _Group:
    """Tokens that end with a whole character, or one mark."""

    shares: list[Share] = field(default_factory=list)
    text: str = ""
    mark: bool = False


class Shares:
    """Follows one reply: give it every delivery, in their order, and then say that it is over."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._texts = renderer.texts
        self._marks = renderer.marks
        self._stream = self._texts.stream()
        self._open = _Group()
        self._waiting: deque[_Group] = deque()
        self._text = ""
        self._at = 0
        """From where on no token was found for the delivered text so far."""
        self._offset = 0
        self._calls = 0
        """Tool calls that were delivered and whose tokens were not met so far."""
        self._in_call = False

    def take(self, delivery: Delivery) -> list[Share]:
        """The tokens of which it is known by now what they give."""
        recorded = np.asarray(delivery.logprobs, np.float32).tolist()
        top = delivery.top or [()] * len(recorded)
        self._text = self._text[self._at :] + "".join([piece.text for piece in delivery.pieces])
        self._at = 0
        self._calls += sum(piece.tool_call is not None for piece in delivery.pieces)
        ready = self._ready(over=False)
        for share in map(Share, delivery.ids, recorded, top):
            if self._add(share):
                ready.append(share)
            elif self._waiting:
                ready += self._ready(over=False)
        return ready

    def end(self) -> list[Share]:
        """All that are left."""
        self._end_run()
        return self._ready(over=True)

    def _add(self, share: Share) -> bool:
        """Whether it is ready at once, as nearly every token is; else it waits."""
        if share.token in self._marks.control:
            self._end_run()
            self._waiting.append(_Group([share], self._renderer.decode([share.token]), mark=True))
            return False
        said = self._stream.step(share.token)
        if said and not (self._open.shares or self._waiting or self._in_call):
            own = self._renderer.token_bytes(share.token)
            if self._text.startswith(said, self._at) and own.decode(errors="replace") == said:
                share.own, share.offset = own, self._offset
                self._at += len(said)
                self._offset += len(said)
                return True
        self._open.shares.append(share)
        self._open.text = said
        if said:
            self._waiting.append(self._open)
            self._open = _Group()
        return False

    def _end_run(self) -> None:
        """What is left of a character that never became whole."""
        if self._open.shares:
            self._open.text = self._stream.end()
            self._waiting.append(self._open)
            self._open = _Group()
        self._stream = self._texts.stream()

    def _ready(self, *, over: bool) -> list[Share]:
        ready: list[Share] = []
        while self._waiting:
            group = self._waiting[0]
            given = self._given(group, over=over)
            if given is None:
                break
            self._at += len(given)
            self._divide(group, given)
            ready += self._waiting.popleft().shares
        return ready

    def _given(self, group: _Group, *, over: bool) -> str | None:
        """What of the text a group gave; None: that is not known yet."""
        text, at, left = self._text, self._at, len(self._text) - self._at
        if self._in_call or not group.text:
            self._in_call = self._in_call and group.shares[0].token != self._marks.tool_end
            return ""
        for said in (group.text, self._own_text(group)):
            if said and text.startswith(said, at):
                return said
            if not over and not self._calls and left < len(said) and said.startswith(text[at:]):
                return None
        if group.mark:
            if group.shares[0].token == self._marks.tool_start and self._calls:
                self._in_call, self._calls = True, self._calls - 1
            return ""
        said = group.text if text.startswith(group.text[:1], at) else group.text.lstrip("\n")
        if not over and not self._calls and left < len(said) and said.startswith(text[at:]):
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(said, text[at : at + len(said)], strict=False))
        return "".join(letter for letter, _ in same)

    def _own_text(self, group: _Group) -> str:
        """What it would say in the middle of a text: a leading space counts there."""
        return b"".join(self._renderer.token_bytes(s.token) for s in group.shares).decode(errors="replace")

    def _divide(self, group: _Group, given: str) -> None:
        """Gives each token of a group its bytes of what the group gave."""
        for share in group.shares:
            share.offset = self._offset
        self._offset += len(given)
        own = [self._renderer.token_bytes(s.token) for s in group.shares] if self._texts.independent else []
        whole = b"".join(own)
        if own and whole.decode(errors="replace") == given:
            start, end = 0, len(whole)
        elif (start := whole.find(given.encode())) >= 0 and given:
            end = start + len(given.encode())
        else:
            group.shares[-1].own = given.encode()
            return
        at = 0
        for share, part in zip(group.shares, own, strict=True):
            share.own = part[max(0, start - at) : max(0, end - at)]
            at += len(part)


def entries(shares: Iterable[Share], renderer: ChatRenderer, top: int) -> list[dict[str, Any]]:
    """In OpenAI's form, for chat completions and responses."""
    return [
        {
            **_entry(renderer, share.token, share.logprob, share.own),
            "top_logprobs": [
                _entry(renderer, token, logprob, renderer.token_bytes(token))
                for token, logprob in share.others[:top]
            ],
        }
        for share in shares
    ]


def _entry(renderer: ChatRenderer, token: int, logprob: float, own: bytes) -> dict[str, Any]:
    text = renderer.token_bytes(token).decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(own)}
