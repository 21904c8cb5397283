"""A reply: a log of deliveries, and its readers.

Owns the deliveries and the readers. `completion`, or `replies` for a recorded reply, adds to the log; any number of clients read
it. Invariants: the log only grows; every reader gets all of it from the beginning at its own pace, so a slow client delays no
other and a second client gets exactly what the first got; tool call ids are functions of the call, so a reply that is read from
the store has the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from gateway.render.renderer import Message
from gateway.render.segmenter import Piece
from gateway.trajectories.conversation import tool_call_id


class Delivery(NamedTuple):
    """Pieces of a reply, with the tokens since the last delivery."""

    pieces: Sequence[Piece]
    ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Sequence[tuple[int, float]]] | None = None
    """For each token the likeliest ids and their log-probabilities, if they were requested; the store does not have them."""


class ReplyListener(Protocol):
    """Receives the events of a reply's readers."""

    async def no_readers(self) -> None:
        """Handle that the last reader has left before the end."""
        ...


class Reply:
    """A reply that grows until it is `ended`; then either `finish_reason` or `failure` shows how it ended."""

    def __init__(
        self,
        call_id: str,
        received_at: float,
        prompt_tokens: int,
        *,
        temperature: float,
        top_p: float,
        listener: ReplyListener | None = None,
    ) -> None:
        """`temperature`, `top_p`: the values in use, which may differ from those that were requested."""
        self.call_id = call_id
        self.received_at = received_at
        self.seconds: float | None = None
        """The time from `received_at` until the reply was complete; None while it is not."""
        self.prompt_tokens = prompt_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.log: list[Delivery] = []
        self.tool_calls: list[dict[str, Any]] = []
        self.ended = False
        self.finish_reason = ""
        self.matched_stop = ""
        """The stop string that ended the reply; empty if none did."""
        self.failure: Exception | None = None
        self.readers: set[Reader] = set()
        self.delivered = False
        """True once a reader has received the whole reply."""
        self._text: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._moved = asyncio.Event()
        self._listener = listener

    def compose(
        self,
        pieces: Sequence[Piece],
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]] | None = None,
    ) -> Delivery:
        """Make pieces part of the message; readers see them after `deliver`."""
        for piece in pieces:
            if piece.tool_call is not None:
                function = {"name": piece.tool_call.name, "arguments": piece.tool_call.arguments}
                name = tool_call_id(self.call_id, len(self.tool_calls))
                self.tool_calls.append({"id": name, "type": "function", "function": function})
            else:
                self._text[piece.kind].append(piece.text)
        return Delivery(pieces, ids, logprobs, top)

    def deliver(self, delivery: Delivery) -> None:
        """Send a delivery to every reader."""
        self.log.append(delivery)
        self._notify()

    def complete(self, seconds: float | None, matched_stop: str) -> None:
        """Set what is known once every token is recorded."""
        self.seconds, self.matched_stop = seconds, matched_stop

    def detach(self) -> None:
        """Remove the listener."""
        self._listener = None

    def end(self, outcome: str | Exception) -> None:
        """End the reply with a finish reason, or with an error that readers get raised after the last delivery."""
        if isinstance(outcome, Exception):
            self.failure = outcome
        else:
            self.finish_reason = outcome
        self.ended = True
        self._notify()

    def message(self) -> Message:
        """Return the reply as a message of OpenAI's API, where content that is missing next to tool calls is `null`."""
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
        """True if the reply has no reader, and none has received all of it."""
        return not self.readers and not self.delivered

    def read(self) -> Reader:
        """Add a reader."""
        reader = Reader(self)
        self.readers.add(reader)
        self.move()
        return reader

    async def leave(self, reader: Reader, delivered: bool) -> None:
        """Remove a reader; `delivered`: it has received the whole reply."""
        self.readers.discard(reader)
        self.delivered = self.delivered or delivered
        self.move()
        if not self.readers and not self.ended and self._listener is not None:
            await self._listener.no_readers()

    def move(self) -> None:
        """Wake all tasks that wait in `moved`."""
        self._moved.set()

    async def moved(self) -> None:
        """Wait until a reader joins or leaves, or `move` is called."""
        self._moved.clear()
        await self._moved.wait()

    def _notify(self) -> None:
        for reader in self.readers:
            reader.changed.set()


class Reader:
    """One client of a reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.changed = asyncio.Event()

    async def leave(self, delivered: bool) -> None:
        """Remove the reader; `delivered`: its client was still connected when the last piece was sent."""
        await self.reply.leave(self, delivered)

    def share(self, changed: asyncio.Event) -> None:
        """Set the event that announces new deliveries, which several readers share."""
        self.changed = changed


Deliveries = list[tuple[int, Delivery]]
"""(index of the choice, its next delivery)."""


class Choices:
    """The replies to one request, as one client reads them. A context manager for the time that the client is connected."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self.replies = [reader.reply for reader in readers]
        self.delivered = False
        """True once everything has been sent to a client that was still connected."""
        self._readers = readers
        self._changed = readers[0].changed
        for reader in readers:
            reader.share(self._changed)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt that all replies continue."""
        return self.replies[0].prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    def mark_delivered(self) -> None:
        """Record that everything has been sent to a client that was still connected."""
        self.delivered = True

    async def __aenter__(self) -> Choices:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if len(self._readers) == 1:
            await self._readers[0].leave(self.delivered)
        else:
            await asyncio.gather(*(reader.leave(self.delivered) for reader in self._readers))

    async def __aiter__(self) -> AsyncIterator[Deliveries]:
        """Yield the deliveries of every reply as they arrive, from the first. Raise the error of a failed reply."""
        known = [0] * len(self.replies)
        while True:
            self._changed.clear()
            deliveries: Deliveries = []
            ended, failure = True, None
            for index, reply in enumerate(self.replies):
                if known[index] < len(reply.log):
                    deliveries += [(index, delivery) for delivery in reply.log[known[index] :]]
                    known[index] = len(reply.log)
                ended = ended and reply.ended
                failure = failure or reply.failure
            if deliveries:
                yield deliveries
            if failure is not None:
                raise failure
            if ended:
                return
            await self._changed.wait()
