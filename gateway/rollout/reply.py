"""A reply as its clients see it: a log of deliveries, and the readers who follow it.

Owns what was delivered, and who reads it. Whoever makes the reply (`completion`, or `replies` from the record) adds to the log;
any number of clients read it. Invariants: the log only grows, and every reader gets all of it from the beginning at a pace of its
own, so a slow client holds up nobody and a second one gets exactly what the first got; the ids of tool calls are functions of the
call, so a reply that is made again from the record has the same.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gateway.render.renderer import Message
from gateway.render.segmenter import Piece


@dataclass(frozen=True, slots=True)
class Delivery:
    """Pieces of a reply, with the tokens that were taken since the last delivery."""

    pieces: Sequence[Piece]
    ids: Sequence[int]
    logprobs: Sequence[float]


class Reply:
    """Grows until it is `over`; then either `finish_reason` or `failure` says how it ended."""

    def __init__(self, call_id: str, received_at: float, prompt_tokens: int) -> None:
        self.call_id = call_id
        self.received_at = received_at
        self.prompt_tokens = prompt_tokens
        self.log: list[Delivery] = []
        self.tool_calls: list[dict[str, Any]] = []
        self.over = False
        self.finish_reason = ""
        self.failure: Exception | None = None
        self.readers: set[Reader] = set()
        self.deserted: Callable[[], Awaitable[None]] | None = None
        """Called when the last reader has left before the end."""
        self.delivered = False
        """A reader got all of it."""
        self._text: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._moved = asyncio.Event()

    def compose(self, pieces: Sequence[Piece], ids: Sequence[int], logprobs: Sequence[float]) -> Delivery:
        """Makes pieces part of the message; nobody sees them before `deliver`."""
        for piece in pieces:
            if piece.tool_call is not None:
                function = {"name": piece.tool_call.name, "arguments": piece.tool_call.arguments}
                self.tool_calls.append({"id": self._tool_call_id(), "type": "function", "function": function})
            else:
                self._text[piece.kind].append(piece.text)
        return Delivery(pieces, ids, logprobs)

    def deliver(self, delivery: Delivery) -> None:
        """Shows a delivery to every reader."""
        self.log.append(delivery)
        self._tell()

    def end(self, outcome: str | Exception) -> None:
        """Ends the reply with a finish reason, or with what readers get raised after what was delivered."""
        if isinstance(outcome, Exception):
            self.failure = outcome
        else:
            self.finish_reason = outcome
        self.over = True
        self._tell()

    def message(self) -> Message:
        """As OpenAI's API has it: no content beside tool calls is `null`."""
        content = "".join(self._text["content"])
        message: Message = {"role": "assistant", "content": content or (None if self.tool_calls else "")}
        if self._text["reasoning"]:
            message["reasoning_content"] = "".join(self._text["reasoning"])
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    @property
    def completion_tokens(self) -> int:
        """Tokens that were delivered."""
        return sum(len(delivery.ids) for delivery in self.log)

    @property
    def orphaned(self) -> bool:
        """Nobody reads it, and nobody has had all of it."""
        return not self.readers and not self.delivered

    def read(self) -> Reader:
        """A new reader, who counts at once and until it leaves."""
        reader = Reader(self)
        self.readers.add(reader)
        self.move()
        return reader

    def move(self) -> None:
        """Wakes whoever waits in `moved`."""
        self._moved.set()

    async def moved(self) -> None:
        """Waits until a reader comes or goes."""
        self._moved.clear()
        await self._moved.wait()

    def _tell(self) -> None:
        for reader in self.readers:
            reader.news.set()

    def _tool_call_id(self) -> str:
        name = f"{self.call_id}:{len(self.tool_calls)}".encode()
        return f"call_{hashlib.blake2b(name, digest_size=12).hexdigest()}"


class Reader:
    """One client's way through a reply: a context to stay in while the client is there."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.news = asyncio.Event()
        self.delivered = False
        """To be set once everything has been sent to a client who was still there."""

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reply = self.reply
        reply.readers.discard(self)
        reply.delivered = reply.delivered or self.delivered
        reply.move()
        if not reply.readers and not reply.over and reply.deserted is not None:
            await reply.deserted()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """Every delivery from the first on, as soon as it is there. Raises what ended the reply, if it failed."""
        reply, known = self.reply, 0
        while True:
            while known < len(reply.log):
                yield reply.log[known]
                known += 1
            if reply.over:
                break
            self.news.clear()
            await self.news.wait()
        if reply.failure is not None:
            raise reply.failure
