"""Token ids to pieces of a reply, as they are sampled: reasoning, content, whole tool calls.

Works on special token ids and streams text at once. What it holds back, and why: bytes of an unfinished character; a tool call
until it is whole; line breaks before a tool call (they belong to the template); the beginning of what may become a stop string.
The same segmenter serves streamed and whole replies, so that both say the same.

Invariant: the pieces depend on the token ids alone, not on how they were split into `push` calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers.decoders import DecodeStream

from gateway.render.renderer import ChatRenderer, Tool, ToolCall

PieceKind = Literal["reasoning", "content", "tool_call"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a reply: text, or one tool call."""

    kind: PieceKind
    text: str = ""
    tool_call: ToolCall | None = None


class Segmenter:
    """The state of one reply. Push tokens, then `finish`."""

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        reasoning: bool,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """`reasoning`: the prompt already opened a reasoning block. `stop`: strings that end the reply, in no piece."""
        self._renderer = renderer
        self._marks = renderer.marks
        self._tools = tools
        self._stop = [s for s in stop if s]
        self._kind: PieceKind = "reasoning" if reasoning else "content"
        self._at_start = True
        self._strip_left = False
        self._tool_ids: list[int] | None = None
        self._held = ""
        self._text_ids: list[int] = []
        self._decoded = 0
        self._stream = DecodeStream(skip_special_tokens=False)
        self.consumed = 0
        """Tokens that belong to the reply so far; fewer than were pushed once `stopped` is set."""
        self.stopped = False
        """A stop string was met; the token that completed it is the last of the reply."""

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Takes the next tokens; answers what can be delivered."""
        pieces: list[Piece] = []
        for token in ids:
            if self.stopped:
                break
            self.consumed += 1
            self._token(token, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """Delivers what was held back: the reply is over."""
        pieces: list[Piece] = []
        if self.stopped:
            return pieces
        if self._tool_ids is not None:
            self._unfinished_tool(pieces)
        self._end_text(pieces)
        self._release(pieces)
        return pieces

    def _token(self, token: int, pieces: list[Piece]) -> None:
        marks = self._marks
        if self._tool_ids is not None:
            self._tool_ids.append(token)
            if token == marks.tool_end:
                self._whole_tool(pieces)
        elif token in marks.stop:
            self._end_text(pieces)
        elif token == marks.think_start and self._at_start:
            self._held = ""
            self._switch("reasoning", pieces)
        elif token == marks.think_end and self._kind == "reasoning":
            self._switch("content", pieces)
        elif token == marks.tool_start and self._tools:
            self._end_text(pieces)
            self._held = self._held.rstrip()
            self._release(pieces)
            self._kind = "content"
            self._tool_ids = [token]
        else:
            self._text(token, pieces)

    def _switch(self, kind: PieceKind, pieces: list[Piece]) -> None:
        self._end_text(pieces)
        if self._kind == "reasoning":
            self._held = self._held.rstrip("\n")
        self._release(pieces)
        self._kind = kind
        self._strip_left = True

    def _text(self, token: int, pieces: list[Piece]) -> None:
        self._text_ids.append(token)
        piece = self._stream.step(self._renderer.backend, token)
        if piece:
            self._decoded += len(piece)
            self._add(piece, pieces)

    def _end_text(self, pieces: list[Piece]) -> None:
        """Ends a run of text; bytes of a character that never became whole are delivered as replacement characters."""
        if self._text_ids:
            rest = self._renderer.decode(self._text_ids)[self._decoded :]
            self._text_ids, self._decoded = [], 0
            self._stream = DecodeStream(skip_special_tokens=False)
            self._add(rest, pieces)

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if self._strip_left:
            text = text.lstrip("\n")
        if not text:
            return
        self._strip_left = False
        self._held += text
        if self._at_start and self._held.strip():
            self._at_start = False
        if self._cut_at_stop(pieces):
            return
        keep = self._hold_back()
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if ready:
            _emit(pieces, self._kind, ready)

    def _cut_at_stop(self, pieces: list[Piece]) -> bool:
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if not found:
            return False
        self._held = self._held[: min(found)]
        self._release(pieces)
        self.stopped = True
        return True

    def _hold_back(self) -> int:
        """How many characters at the end may still turn out not to be deliverable."""
        held = self._held
        if self._at_start:
            return len(held)
        whitespace = len(held) - len(held.rstrip("\n"))
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(held)), whitespace, -1):
                if held.endswith(stop[:size]):
                    whitespace = size
                    break
        return whitespace

    def _release(self, pieces: list[Piece]) -> None:
        if self._held:
            _emit(pieces, self._kind, self._held)
            self._held = ""

    def _whole_tool(self, pieces: list[Piece]) -> None:
        assert self._tool_ids is not None
        calls = self._renderer.parse_tool_calls(self._tool_ids, self._tools)
        if calls:
            pieces.extend(Piece("tool_call", tool_call=call) for call in calls)
            self._strip_left = True
        else:
            _emit(pieces, "content", self._renderer.decode(self._tool_ids))
        self._at_start = False
        self._tool_ids = None

    def _unfinished_tool(self, pieces: list[Piece]) -> None:
        """A tool call that was cut off is no call; the client gets its text."""
        assert self._tool_ids is not None
        ids = [token for token in self._tool_ids if token not in self._marks.stop]
        _emit(pieces, "content", self._renderer.decode(ids))
        self._tool_ids = None


def _emit(pieces: list[Piece], kind: PieceKind, text: str) -> None:
    """Adds text, to the last piece if it is of the same kind."""
    if pieces and pieces[-1].kind == kind:
        text = pieces.pop().text + text
    pieces.append(Piece(kind, text))
