"""Token ids to pieces of a reply, as they are sampled: reasoning, content, whole tool calls.

Works on special token ids and streams text immediately. Holds back, and why: bytes of an unfinished character; a tool call
until it is whole; line breaks before a tool call (they belong to the template); the beginning of what may become a stop string;
where a family writes calls without a mark, a reply that begins with `{`, because it may be one. The same segmenter serves
streamed and whole replies, so that both are the same.

Invariant: the pieces depend on the token ids alone, not on how they were split into `push` calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gateway.render.renderer import ChatRenderer, Marks, Tool, ToolCall
from gateway.render.stops import StopStrings
from headgate.types import Int32Array

PieceKind = Literal["reasoning", "content", "tool_call"]


class Piece(NamedTuple):
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
        stop: StopStrings | None = None,
        max_tool_calls: int | None = None,
        raw: bool = False,
    ) -> None:
        """`reasoning`: the prompt already opened a reasoning block. `stop`: the strings that end it, in no piece.

        `max_tool_calls`: the reply ends with the token that completes this many calls; None: it may make any number.
        `raw`: everything is content as it stands; only the end of the reply is looked for.
        """
        self._renderer = renderer
        self._marks = marks = Marks(renderer.marks.stop, None, None, None, None) if raw else renderer.marks
        self._tools = tools
        self._names = self.tool_names if marks.bare_calls else set()
        self._stop = stop
        self._may_begin_stop = stop.may_begin if stop is not None else None
        self._stop_place = 0
        """The place in `stop` that the text so far leads to."""
        self._calls_left = max_tool_calls
        self._kind: PieceKind = "reasoning" if reasoning else "content"
        self._at_start = True
        self._strip_left = False
        self._maybe_bare = bool(self._names)
        """The reply may still be a tool call without a mark, and is held as a whole."""
        self._tool_ids: list[int] | None = None
        self._withheld = ""
        self._in_run = False
        self._stream = renderer.texts.stream()
        self._step = self._stream.step
        special = {*marks.stop, marks.think_start, marks.think_end, marks.tool_start if tools else None}
        self._special = frozenset(token for token in special if token is not None)
        self._plain = False
        """Ordinary text goes straight through: nothing is held, and nothing is waited for."""
        self.consumed = 0
        """Tokens that belong to the reply so far; fewer than were pushed once `stopped` is set."""
        self.stopped = False
        """A stop string was met, or the last tool call was made; the token that completed it is the last of the reply."""
        self.matched_stop = ""
        """The stop string that was met."""

    @property
    def tool_names(self) -> set[str]:
        """The names of the request's tools."""
        return {tool["function"]["name"] for tool in self._tools}

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Take the next tokens; return what can be delivered."""
        pieces: list[Piece] = []
        for token in ids:
            if self._plain and token not in self._special:
                self.consumed += 1
                self._in_run = True
                text = self._step(token)
                if text:
                    begins = self._may_begin_stop
                    if text[-1] != "\n" and (begins is None or begins(text) is None):
                        _emit(pieces, self._kind, text)
                        continue
                    self._add(text, pieces)
                    self._plain = self._is_plain()
                continue
            if self.stopped:
                break
            self.consumed += 1
            self._token(token, pieces)
            self._plain = self._is_plain()
        return pieces

    def finish(self) -> list[Piece]:
        """Deliver what was held back: the reply is over."""
        pieces: list[Piece] = []
        if self.stopped:
            return pieces
        if self._tool_ids is not None:
            self._end_tool(pieces)
        self._end_text(pieces)
        if not self.stopped:
            self._bare_call(pieces)
            self._release(pieces)
        return pieces

    def _is_plain(self) -> bool:
        return not (
            self._withheld or self._at_start or self._strip_left or self._tool_ids is not None or self.stopped
        )

    def _token(self, token: int, pieces: list[Piece]) -> None:
        marks = self._marks
        if self._tool_ids is not None:
            self._tool_token(token, pieces)
        elif token in marks.stop:
            self._end_text(pieces)
            if not self.stopped:
                self._bare_call(pieces)
        elif token == marks.think_start and self._at_start:
            self._withheld, self._stop_place = "", 0
            self._switch("reasoning", pieces)
        elif token == marks.think_end and self._kind == "reasoning":
            self._switch("content", pieces)
        elif token == marks.tool_start and self._tools:
            self._begin_tool(token, pieces)
        else:
            self._in_run = True
            text = self._step(token)
            if text:
                self._add(text, pieces)

    def _switch(self, kind: PieceKind, pieces: list[Piece]) -> None:
        self._end_text(pieces)
        if self.stopped:
            return
        if self._kind == "reasoning":
            self._withheld = self._withheld.rstrip("\n")
        self._release(pieces)
        self._kind = kind
        self._strip_left = True

    def _end_text(self, pieces: list[Piece]) -> None:
        """End a run of text; bytes of a character that never became whole are delivered as replacement characters."""
        if self._in_run:
            rest = self._stream.end()
            self._in_run = False
            self._stream = self._renderer.texts.stream()
            self._step = self._stream.step
            self._add(rest, pieces)

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if self._strip_left:
            text = text.lstrip("\n")
        if not text:
            return
        self._strip_left = False
        self._withheld += text
        if self._at_start and (begin := self._withheld.lstrip()):
            self._at_start = False
            self._maybe_bare = self._maybe_bare and self._kind == "content" and begin[0] == "{"
        if self._stop is not None and self._cut_at_stop(self._stop, text, pieces):
            return
        keep = self._hold_back()
        ready, self._withheld = (
            self._withheld[: len(self._withheld) - keep],
            self._withheld[len(self._withheld) - keep :],
        )
        if ready:
            _emit(pieces, self._kind, ready)

    def _cut_at_stop(self, stop: StopStrings, text: str, pieces: list[Piece]) -> bool:
        """Return whether `text`, added to what is held, completes a stop string; if so, end the reply before it."""
        self._stop_place, begins, self.matched_stop = stop.read(self._stop_place, text)
        if not self.matched_stop:
            return False
        self._withheld = self._withheld[: len(self._withheld) - len(text) + begins]
        self._release(pieces)
        self.stopped = True
        return True

    def _hold_back(self) -> int:
        """Return the number of characters at the end that may still turn out not to be deliverable."""
        withheld = self._withheld
        if self._at_start or self._maybe_bare:
            return len(withheld)
        whitespace = len(withheld) - len(withheld.rstrip("\n"))
        return whitespace if self._stop is None else max(whitespace, self._stop.depth[self._stop_place])

    def _release(self, pieces: list[Piece]) -> None:
        if self._withheld:
            _emit(pieces, self._kind, self._withheld)
        self._withheld, self._stop_place = "", 0

    def _begin_tool(self, token: int, pieces: list[Piece]) -> None:
        self._end_text(pieces)
        if self.stopped:
            return
        self._withheld = self._withheld.rstrip()
        self._release(pieces)
        self._kind = "content"
        self._maybe_bare = False
        self._tool_ids = [token]

    def _tool_token(self, token: int, pieces: list[Piece]) -> None:
        assert self._tool_ids is not None
        marks = self._marks
        if marks.tool_end is None and (token in marks.stop or token == marks.tool_start):
            self._end_tool(pieces)
            if token == marks.tool_start and not self.stopped:
                self._begin_tool(token, pieces)
            return
        self._tool_ids.append(token)
        if token == marks.tool_end:
            self._end_tool(pieces)

    def _end_tool(self, pieces: list[Piece]) -> None:
        """Parse a held block: calls, or text if it was cut off."""
        ids, marks = self._tool_ids, self._marks
        assert ids is not None
        self._tool_ids = None
        self._at_start = False
        whole = marks.tool_end is None or ids[-1] == marks.tool_end
        calls = self._renderer.parse_tool_calls(ids, self._tools) if whole else []
        if calls:
            self._deliver(calls, pieces)
            self._strip_left = True
        else:
            _emit(pieces, "content", self._renderer.decode([i for i in ids if i not in marks.stop]))

    def _bare_call(self, pieces: list[Piece]) -> None:
        """Release text that was held because it might be a call without a mark."""
        if not self._maybe_bare or self._at_start:
            return
        self._maybe_bare = False
        form = self._renderer.form
        calls = form.parse(self._withheld) if form is not None else []
        if calls and all(call.name in self._names for call in calls):
            self._withheld, self._stop_place = "", 0
            self._deliver(calls, pieces)

    def _deliver(self, calls: list[ToolCall], pieces: list[Piece]) -> None:
        if self._calls_left is not None:
            calls = calls[: self._calls_left]
            self._calls_left -= len(calls)
            self.stopped = self._calls_left == 0
        pieces.extend(Piece("tool_call", tool_call=call) for call in calls)


def _emit(pieces: list[Piece], kind: PieceKind, text: str) -> None:
    """Add text, to the last piece if it is of the same kind."""
    if pieces and pieces[-1].kind == kind:
        text = pieces.pop().text + text
    pieces.append(Piece(kind, text))


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The format of a request's replies; each reply gets a segmenter of its own."""

    renderer: ChatRenderer
    tools: Sequence[Tool] = ()
    stop: StopStrings | None = None
    max_tool_calls: int | None = None
    raw: bool = False
    """True: everything is content as it stands."""

    def __call__(self, prompt: Int32Array) -> Segmenter:
        """Return a segmenter for what follows a prompt."""
        if self.raw:
            return Segmenter(self.renderer, reasoning=False, stop=self.stop, raw=True)
        return Segmenter(
            self.renderer,
            reasoning=self.renderer.reasoning_open(prompt[-8:].tolist()),
            tools=self.tools,
            stop=self.stop,
            max_tool_calls=self.max_tool_calls,
        )
