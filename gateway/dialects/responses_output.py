"""Responses, as OpenAI's API has them: the response and its events.

A reply becomes items in the order in which its pieces come: reasoning, messages, function calls. Invariants: events and the whole
response show the same items; sequence numbers have no gaps; no event marks the response as complete before `keep` is done, so
a client that has the end can come back for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import orjson

from gateway.dialects.logprobs import LogprobAligner, TokenLogprob, entries
from gateway.dialects.responses import ResponsesRequest
from gateway.dialects.responses_input import item_id
from gateway.dialects.responses_items import OutputItem
from gateway.dialects.responses_tools import Toolbox, offered
from gateway.generation.reply import Choices, Delivery, Reply
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Piece
from headgate.errors import GatewayError

Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""Stores a whole response."""


class ResponsesOutput:
    """The reply to a request, in OpenAI's form, for one client."""

    def __init__(
        self,
        choices: Choices,
        request: ResponsesRequest,
        toolbox: Toolbox,
        renderer: ChatRenderer,
        keep: Keep | None,
    ) -> None:
        """`keep`: None if the response is not to be stored."""
        self._choices = choices
        self._reply = choices.replies[0]
        self._request = request
        self._toolbox = toolbox
        self._renderer = renderer
        self._keep = keep
        self._items: list[OutputItem] = []
        self._calls = 0
        self._sequence = 0
        self._aligner = LogprobAligner(renderer)
        self._entries: list[dict[str, Any]] = []
        """Log-probabilities that are not in an item yet."""
        self._text_follows: bool | None = None
        """True if the next token is of a message; None before anything has come."""
        self._called = False
        """True once a tool call has begun."""
        self._echo = _echo(request, self._reply)

    async def complete(self) -> dict[str, Any]:
        """Return the response in one piece."""
        async for deliveries in self._choices:
            for _, delivery in deliveries:
                self._events(delivery)
        self._end()
        return await self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; what has come together is yielded together."""
        async for deliveries in self._choices:
            begun = b"" if self._sequence else self._opening_events()
            yield begun + b"".join([self._events(delivery) for _, delivery in deliveries])
        ended = self._end()
        response = await self._finished()
        yield ended + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: GatewayError) -> bytes:
        """Return the events that end a stream that failed: OpenAI's SDK raises on the first of them, others wait for the
        second."""
        event = error_event(error, self._sequence)
        self._sequence += 1
        fault = {"code": "server_error", "message": error.message}
        return event + self._event("response.failed", response={**self._response("failed"), "error": fault})

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    @property
    def _completed_at(self) -> int | None:
        seconds = self._reply.seconds
        return None if seconds is None else int(self._reply.received_at + seconds)

    async def _finished(self) -> dict[str, Any]:
        response = self._response(self._status)
        response["usage"] = self._usage()
        if self._status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            await self._keep(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self._reply.call_id,
            "object": "response",
            "created_at": int(self._reply.received_at),
            "completed_at": self._completed_at if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [item.api_form() for item in self._items],
            "usage": None,
            **self._echo,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._choices.prompt_tokens, self._choices.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "total_tokens": prompt + completion,
        }

    def _reasoning_tokens(self) -> int:
        """Return the number of tokens up to the mark that ends reasoning; all if there is none."""
        if not any(item.kind == "reasoning" for item in self._items):
            return 0
        ids = [token for delivery in self._reply.log for token in delivery.ids]
        end = self._renderer.marks.think_end
        return ids.index(end) + 1 if end in ids else len(ids)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = _event(kind, self._sequence, fields)
        self._sequence += 1
        return event

    def _opening_events(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _events(self, delivery: Delivery) -> bytes:
        """Add a delivery; return its events."""
        if self._request.logprobs:
            if self._text_follows is None:
                self._text_follows = not (delivery.pieces and delivery.pieces[0].kind == "reasoning")
            self._log(self._aligner.add(delivery))
        return b"".join([self._piece(piece) for piece in delivery.pieces])

    def _piece(self, piece: Piece) -> bytes:
        if piece.tool_call is not None:
            return self._tool_call()
        kind = "reasoning" if piece.kind == "reasoning" else "message"
        begun = b""
        if not self._items or self._items[-1].kind != kind:
            begun = self._close() + self._open(kind)
        item = self._items[-1]
        item.texts.append(piece.text)
        if kind == "message" and self._request.logprobs:
            taken = self._pop_entries(item)
            event = self._event(_DELTA[kind], **item.place, delta=piece.text, logprobs=taken)
            return begun + event
        text = orjson.dumps(piece.text)
        for head in item.heads:  # the usual case: most events of most streams
            begun += b"%b%d%b%b}\n\n" % (head, self._sequence, _DELTA_TEXT, text)
            self._sequence += 1
        return begun

    def _open(self, kind: str) -> bytes:
        index = len(self._items)
        prefix = "rs" if kind == "reasoning" else "msg"
        item = OutputItem(kind, item_id(prefix, self._reply.call_id, index), index)
        item.heads.append(_head(_DELTA[kind], item.place | ({"logprobs": []} if kind == "message" else {})))
        self._items.append(item)
        events = [
            self._event("response.output_item.added", output_index=index, item=item.empty_form()),
            self._event("response.content_part.added", **item.place, part=item.content_part),
        ]
        if kind == "reasoning" and self._request.summarized:
            item.summarized = True
            item.heads.append(_head("response.reasoning_summary_text.delta", item.summary_place))
            part, place = item.summary[0], item.summary_place
            events.append(self._event("response.reasoning_summary_part.added", **place, part=part))
        return b"".join(events)

    def _close(self, status: str = "completed") -> bytes:
        """End the text that is open, if one is."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return b""
        logprobs = {}
        if item.kind == "message":
            self._pop_entries(item)
            logprobs = {"logprobs": item.logprobs}
        item.status = status
        events = [
            self._event(_DONE[item.kind], **item.place, text=item.text, **logprobs),
            self._event("response.content_part.done", **item.place, part=item.content_part),
        ]
        for part in item.summary:
            place = item.summary_place
            events.append(self._event("response.reasoning_summary_text.done", **place, text=item.text))
            events.append(self._event("response.reasoning_summary_part.done", **place, part=part))
        shown = item.api_form()
        events.append(self._event("response.output_item.done", output_index=item.index, item=shown))
        return b"".join(events)

    def _tool_call(self) -> bytes:
        """Yield the events of a call, which comes in one piece."""
        closed = self._close()
        call, index = self._toolbox.call(self._reply.tool_calls[self._calls]), len(self._items)
        self._calls += 1
        kind = call["type"]
        prefix, event, filled = _CALL_EVENTS[kind]
        item = OutputItem(kind, item_id(prefix, self._reply.call_id, index), index, call=call)
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=index, item=item.empty_form())
        item.status = "completed"
        place, given = {"item_id": item.id, "output_index": index}, {filled: call[filled]}
        named = {"name": call["name"]} if kind == "function_call" else {}
        filled_in = self._event(f"{event}.delta", **place, delta=call[filled])
        filled_in += self._event(f"{event}.done", **place, **named, **given)
        done = self._event("response.output_item.done", output_index=index, item=item.api_form())
        return closed + added + filled_in + done

    def _end(self) -> bytes:
        """Return the events that finish the items. A reply without a word is an empty message."""
        begun = b"" if self._sequence else self._opening_events()
        if self._request.logprobs:
            self._log(self._aligner.end())
        return begun + (b"" if self._items else self._open("message")) + self._close(self._status)

    def _log(self, tokens: Sequence[TokenLogprob]) -> None:
        """Keep the log-probabilities of messages: neither of reasoning, nor of anything from a tool call on."""
        marks = self._renderer.marks
        top = self._request.top_logprobs or 0
        for sampled in tokens:
            if sampled.token == marks.think_end:
                self._text_follows = True
            elif sampled.token in marks.stop:
                self._text_follows = False
            elif sampled.token == marks.tool_start:
                self._called = True
            elif self._text_follows and not self._called:
                self._entries += entries([sampled], self._renderer, top)

    def _pop_entries(self, item: OutputItem) -> list[dict[str, Any]]:
        taken, self._entries = self._entries, []
        item.logprobs += taken
        return taken


_DELTA = {"message": "response.output_text.delta", "reasoning": "response.reasoning_text.delta"}
_DONE = {"message": "response.output_text.done", "reasoning": "response.reasoning_text.done"}
_DELTA_TEXT = b',"delta":'
_CALL_EVENTS = {
    "function_call": ("fc", "response.function_call_arguments", "arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input", "input"),
}
"""The prefix of ids, the prefix of events' types, and the field that events fill, by kind of call."""


def error_event(error: GatewayError, sequence: int = 0) -> bytes:
    """Return the event of a failed stream. The API documents a flat one; clients raise on a nested one."""
    fault = {"code": error.code, "message": error.message, "param": error.param}
    return _event("error", sequence, {**fault, "error": {"type": error.type, **fault}})


def _event(kind: str, sequence: int, fields: dict[str, Any]) -> bytes:
    data = orjson.dumps({"type": kind, "sequence_number": sequence, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _head(kind: str, fields: dict[str, Any]) -> bytes:
    """Return the beginning of an event of this kind, up to its sequence number and its content."""
    fields_json = orjson.dumps({"type": kind, **fields})[:-1]
    return b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), fields_json)


def _echo(request: ResponsesRequest, reply: Reply) -> dict[str, Any]:
    """Return the request's parameters as the response repeats them: as requested, or as used instead; null where not given."""
    reasoning = request.reasoning
    return {
        "background": False,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stored,
        "temperature": reply.temperature,
        "text": {**(request.text or {}), "format": _format(request.format)},
        "tool_choice": request.tool_choice or "auto",
        "tools": list(offered(request.tools or ())),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": reply.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _format(requested: dict[str, Any]) -> dict[str, Any]:
    return (
        {"description": None, "strict": False, **requested}
        if requested["type"] == "json_schema"
        else requested
    )
