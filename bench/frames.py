"""A reply as the bytes in which vLLM's two APIs and Anthropic's Messages API would send it, ready before anybody asks.

Pure. A `Chunks` holds the frames of one stream (HTTP's chunked coding and server-sent events together), all but the request's id.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from bench.model import MIXTURE
from bench.replies import ARGUMENTS, LOGPROB, TOOL, Reply

_CREATED = 1_700_000_000
_END = b"0\r\n\r\n"
_DONE = b"e\r\ndata: [DONE]\n\n\r\n" + _END


@dataclass(frozen=True, slots=True)
class Chunks:
    """The events of a stream: each is `head`, the request's id, and one of `tails`; an empty tail is nothing to send."""

    head: bytes
    tails: list[tuple[bytes, ...]]
    gap_s: float
    """Seconds from one to the next."""
    end: bytes = _DONE
    """The bytes after the last one."""

    def __len__(self) -> int:
        return len(self.tails)

    def frame(self, number: int, name: str) -> bytes:
        """Return the bytes that are sent at one moment; the last frame ends the response."""
        frame = b"".join(self._event(tail, name) for tail in self.tails[number])
        return frame + self.end if number == len(self.tails) - 1 else frame

    def abort(self, sent: int, name: str, label: str) -> bytes:
        """Return the end of a generation that is aborted after `sent` frames."""
        count = sum(
            len(orjson.loads(b'{"id":"' + tail)["choices"][0]["token_ids"]) for (tail,) in self.tails[:sent]
        )
        return self._event(_generate_tail([], "abort", label, count), name) + _DONE

    def _event(self, tail: bytes, name: str) -> bytes:
        event = b"%b%b%b\n\n" % (self.head, name.encode(), tail)
        return b"%x\r\n%b\r\n" % (len(event), event)


def generate_chunks(reply: Reply, gap_s: float, interval: int, label: str, routed: int = 0) -> Chunks:
    """Return a generation, `interval` tokens in a chunk; the last one has the experts of `routed` tokens."""
    size = len(reply.ids)
    tails: list[tuple[bytes, ...]] = []
    for start in range(0, size, interval):
        ids = reply.ids[start : start + interval]
        finish = _engine_finish(reply) if start + interval >= size else None
        choice = _generated(ids, finish, label, size)
        if finish and routed:
            choice["routed_experts"] = routes_of(routed)
        tails.append((_tail({"choices": [choice]}),))
    return Chunks(b'data: {"request_id":"', tails, gap_s * interval)


def chat_chunks(reply: Reply, gap_s: float, *, usage: bool) -> Chunks:
    """Return a chat's reply, a token in a chunk; the role comes with the first one, the usage (on request) with the last."""
    tails: list[tuple[bytes, ...]] = []
    last = len(reply.ids) - 1
    for i, delta in enumerate(reply.deltas):
        found = []
        if i == 0:
            found.append(_chat_tail({"role": "assistant", "content": ""}))
        if delta is not None or i == last:
            finish = reply.finish if i == last else None
            found.append(_chat_tail(delta or {}, reply.ids[i], reply.texts[i], finish))
        if i == last and usage:
            found.append(_tail({**_CHAT_HEAD, "choices": [], "usage": _usage(reply)}))
        tails.append(tuple(found))
    return Chunks(b'data: {"id":"', tails, gap_s)


def message_chunks(reply: Reply, gap_s: float) -> Chunks:
    """Return a message, a token in a chunk; its start comes with the first one, its stop and usage with the last.

    All requests get the same id, so no event waits for one.
    """
    start: dict[str, Any] = {**_MESSAGE_HEAD, "content": [], **_stopped(None), "usage": _message_usage(0)}
    found = [_message_event("message_start", message=start)]
    tails: list[tuple[bytes, ...]] = []
    index, opened = -1, ""
    for delta in reply.deltas:
        field, text = _piece(delta)
        if field not in ("", opened):
            found += _stop_block(index)
            index, opened = index + 1, field
            block = _BLOCKS[field].empty
            found.append(_message_event("content_block_start", index=index, content_block=block))
        if text:
            delta = {"type": _BLOCKS[field].delta, _BLOCKS[field].text: text}
            found.append(_message_event("content_block_delta", index=index, delta=delta))
        tails.append(tuple(found))
        found = []
    usage = _message_usage(len(reply.ids))
    stop = _message_event("message_delta", delta=_stopped(reply.finish), usage=usage)
    tails[-1] += (*_stop_block(index), stop, _message_event("message_stop"))
    return Chunks(b"", tails, gap_s, _END)


def routes_of(rows: int) -> str:
    """Return the experts of some tokens, of 48 layers with 8 of 128 experts each, as vLLM reports them."""
    file = io.BytesIO()
    at = np.arange(rows * MIXTURE["num_hidden_layers"]).reshape(rows, -1, 1)
    chosen = (7 * at + np.arange(MIXTURE["num_experts_per_tok"])) % MIXTURE["num_experts"]
    np.save(file, chosen.astype(np.uint8), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def generate_whole(reply: Reply, name: str, label: str) -> dict[str, Any]:
    """Return a generation that is not streamed."""
    return {
        "request_id": name,
        "choices": [_generated(reply.ids, _engine_finish(reply), label, len(reply.ids))],
    }


def chat_whole(reply: Reply) -> dict[str, Any]:
    """Return a chat's response that is not streamed."""
    content = [_logprob(text) for text in reply.texts]
    choice = {
        "index": 0,
        "message": reply.message(),
        "logprobs": {"content": content},
        "finish_reason": reply.finish,
        "token_ids": reply.ids,
    }
    head = {"id": "chatcmpl-mock", "object": "chat.completion", "created": _CREATED, "model": "bench"}
    return {**head, "choices": [choice], "usage": _usage(reply)}


def message_whole(reply: Reply) -> dict[str, Any]:
    """Return a message that is not streamed."""
    texts = {field: reply.joined(field) for field in ("reasoning_content", "content")}
    content = [{**_BLOCKS[field].empty, _BLOCKS[field].text: text} for field, text in texts.items() if text]
    if reply.finish == "tool_calls":
        content.append({**_BLOCKS["tool_calls"].empty, "input": orjson.loads(ARGUMENTS)})
    usage = _message_usage(len(reply.ids))
    return {**_MESSAGE_HEAD, "content": content, **_stopped(reply.finish), "usage": usage}


class _Block(NamedTuple):
    """A message's block before it has text, the type of its deltas, and the name of their text."""

    empty: dict[str, Any]
    delta: str
    text: str


_BLOCKS = {
    "reasoning_content": _Block(
        {"type": "thinking", "thinking": "", "signature": "mock"}, "thinking_delta", "thinking"
    ),
    "content": _Block({"type": "text", "text": ""}, "text_delta", "text"),
    "tool_calls": _Block(
        {"type": "tool_use", "id": "call-0", "name": TOOL, "input": {}}, "input_json_delta", "partial_json"
    ),
}
"""The kind of block for each field of a chat's delta."""
_MESSAGE_HEAD = {"id": "msg_mock", "type": "message", "role": "assistant", "model": "bench"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _piece(delta: dict[str, Any] | None) -> tuple[str, str]:
    """Return the field of a chat's delta, and the text in it."""
    for field, value in (delta or {}).items():
        return field, value if isinstance(value, str) else value[0]["function"]["arguments"]
    return "", ""


def _message_event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _stop_block(index: int) -> list[bytes]:
    return [_message_event("content_block_stop", index=index)] if index >= 0 else []


def _stopped(finish: str | None) -> dict[str, str | None]:
    return {"stop_reason": finish and _STOP_REASONS[finish], "stop_sequence": None}


def _message_usage(tokens: int) -> dict[str, int]:
    return {"input_tokens": 16, "output_tokens": tokens}


_CHAT_HEAD = {"object": "chat.completion.chunk", "created": _CREATED, "model": "bench"}


def _generated(ids: list[int], finish: str | None, label: str, total: int) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": LOGPROB, "rank": 1} for token in ids]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": [{"version": label, "start": 0, "end": total}] if finish else None,
    }


def _generate_tail(ids: list[int], finish: str | None, label: str, total: int) -> bytes:
    return _tail({"choices": [_generated(ids, finish, label, total)]})


def _chat_tail(
    delta: dict[str, Any], token: int | None = None, text: str = "", finish: str | None = None
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    if token is not None:
        choice |= {"logprobs": {"content": [_logprob(text)]}, "token_ids": [token]}
    return _tail({**_CHAT_HEAD, "choices": [choice]})


def _logprob(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": LOGPROB, "bytes": list(text.encode()), "top_logprobs": []}


def _tail(value: dict[str, Any]) -> bytes:
    """Return a JSON object without its beginning: what follows the id."""
    return b'",' + orjson.dumps(value)[1:]


def _usage(reply: Reply) -> dict[str, int]:
    return {"prompt_tokens": 16, "completion_tokens": len(reply.ids), "total_tokens": 16 + len(reply.ids)}


def _engine_finish(reply: Reply) -> str:
    """Return an engine knows no tool calls: a turn stops."""
    return "length" if reply.finish == "length" else "stop"
