"""Anthropic's Messages API: a reply as its message, whole or as its events.

Thinking that was not requested is left out: such clients read the first block as the reply. Its tokens count, and
the record has them, so nothing is lost when the conversation goes on. A tool call is one block with all its input in one event,
because a call is known only when it is whole. Invariant: whole or streamed, for the first client or for a retry, the blocks,
their ids and signatures are the same.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import orjson

from gateway.dialects.messages import MessagesRequest
from gateway.generation.reply import Choices, Reply
from gateway.render.segmenter import Piece
from headgate.json_depth import check_depth

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
Block = dict[str, Any]


class MessagesOutput:
    """The one reply to a request, for one client."""

    def __init__(self, choices: Choices, request: MessagesRequest) -> None:
        self._choices = choices
        self._reply: Reply = choices.replies[0]
        self._request = request
        thinking = request.thinking
        self._shown = thinking is not None and thinking.type != "disabled"
        self._omitted = thinking is not None and thinking.display == "omitted"
        self._index = -1
        """The index of the newest block."""
        self._open = ""
        """The kind of piece that the newest block is made of, while it may grow."""
        self._delta_head = b""
        self._calls = 0

    async def complete(self) -> dict[str, Any]:
        """Return the response in one piece."""
        blocks: list[Block] = []
        async for deliveries in self._choices:
            for _, delivery in deliveries:
                for piece in delivery.pieces:
                    self._gather(blocks, piece)
        return {**self._message(), "content": blocks, **self._stop(), "usage": self._usage()}

    def _gather(self, blocks: list[Block], piece: Piece) -> None:
        if piece.kind == "reasoning" and not self._shown:
            return
        if piece.tool_call is not None:
            self._open = ""
            block, _ = self._next_call()
            blocks.append(block)
            return
        name = "thinking" if piece.kind == "reasoning" else "text"
        if piece.kind != self._open:
            self._open, self._index = piece.kind, len(blocks)
            blocks.append({"type": name, name: ""})
            if name == "thinking":
                blocks[-1]["signature"] = self._signature()
        if not (name == "thinking" and self._omitted):
            blocks[-1][name] += piece.text

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; what has come together is yielded together."""
        begun = False
        async for deliveries in self._choices:
            events = [] if begun else [self._start()]
            begun = True
            for _, delivery in deliveries:
                events += [self._events(piece) for piece in delivery.pieces]
            if some := b"".join(events):
                yield some
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        yield b"".join([self._close(), _event(delta), _event({"type": "message_stop"})])

    def _start(self) -> bytes:
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": {**message, "usage": self._usage(0)}})

    def _events(self, piece: Piece) -> bytes:
        if piece.kind != self._open:
            if piece.kind == "reasoning" and not self._shown:
                return b""
            closed = self._close()
            self._index += 1
            if piece.tool_call is not None:
                return closed + self._call_events()
            return b"".join([closed, self._begin(piece.kind), self._delta(piece.text)])
        return self._delta(piece.text)

    def _begin(self, kind: str) -> bytes:
        self._open = kind
        name = "thinking" if kind == "reasoning" else "text"
        self._delta_head = _DELTA % (self._index, name.encode(), name.encode())
        block = {"type": name, name: ""}
        if name == "thinking":
            block["signature"] = ""
        return self._block_start(block)

    def _delta(self, text: str) -> bytes:
        if self._omitted and self._open == "reasoning":
            return b""
        return b"%b%b}}\n\n" % (self._delta_head, orjson.dumps(text))

    def _close(self) -> bytes:
        """End the block that may grow, if there is one."""
        kind, self._open = self._open, ""
        if not kind:
            return b""
        stop = _event({"type": "content_block_stop", "index": self._index})
        if kind == "reasoning":
            return self._block_delta({"type": "signature_delta", "signature": self._signature()}) + stop
        return stop

    def _call_events(self) -> bytes:
        block, arguments = self._next_call()
        return b"".join(
            [
                self._block_start({**block, "input": {}}),
                self._block_delta({"type": "input_json_delta", "partial_json": arguments}),
                _event({"type": "content_block_stop", "index": self._index}),
            ]
        )

    def _next_call(self) -> tuple[Block, str]:
        """Return the next tool call as a block, and its input as text."""
        call = self._reply.tool_calls[self._calls]
        self._calls += 1
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        given = _input(arguments)
        # The model's arguments are not an object: let the tool report it, not the client's parser
        if given is None:
            given = {"raw_arguments": arguments}
            arguments = orjson.dumps(given).decode()
        return {"type": "tool_use", "id": call["id"], "name": name, "input": given}, arguments

    def _block_start(self, block: Block) -> bytes:
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._reply.call_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
        }

    def _stop(self) -> dict[str, Any]:
        reply = self._reply
        reason, matched = _REASONS[reply.finish_reason], None
        if reason == "end_turn" and reply.matched_stop:
            reason, matched = "stop_sequence", reply.matched_stop
        if reason == "max_tokens" and reply.completion_tokens < self._request.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self, output_tokens: int | None = None) -> dict[str, Any]:
        return {
            "input_tokens": self._reply.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": self._reply.completion_tokens if output_tokens is None else output_tokens,
            "service_tier": "standard",
        }

    def _signature(self) -> str:
        """Return the signature of a block of thinking. Clients send it back, and nothing is read from it."""
        name = f"{self._reply.call_id}:{self._index}".encode()
        return base64.b64encode(hashlib.blake2b(name, digest_size=24).digest()).decode()


_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"%b_delta","%b":'
)


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


def _input(arguments: str) -> dict[str, Any] | None:
    """Return arguments as an object; None if they are none."""
    try:
        given = orjson.loads(arguments)
        check_depth(given)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None
