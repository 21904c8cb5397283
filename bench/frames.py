"""A reply as the bytes in which vLLM's two APIs would send it, ready before anybody asks.

Pure. A `Chunks` holds the frames of one stream (HTTP's chunked coding and server-sent events together), all but the request's id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from bench.replies import LOGPROB, Reply

_CREATED = 1_700_000_000
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """The events of a stream: each is `head`, the request's id, and one of `tails`; an empty tail is nothing to send."""

    head: bytes
    tails: list[tuple[bytes, ...]]
    gap_s: float
    """Seconds from one to the next."""

    def __len__(self) -> int:
        return len(self.tails)

    def frame(self, number: int, name: str) -> bytes:
        """Returns the bytes that are sent at one moment; the last frame ends the answer."""
        frame = b"".join(self._event(tail, name) for tail in self.tails[number])
        return frame + _DONE if number == len(self.tails) - 1 else frame

    def abort(self, sent: int, name: str, label: str) -> bytes:
        """The end of a generation that is given back after `sent` frames."""
        count = sum(
            len(orjson.loads(b'{"id":"' + tail)["choices"][0]["token_ids"]) for (tail,) in self.tails[:sent]
        )
        return self._event(_generate_tail([], "abort", label, count), name) + _DONE

    def _event(self, tail: bytes, name: str) -> bytes:
        event = b"data: %b%b%b\n\n" % (self.head, name.encode(), tail)
        return b"%x\r\n%b\r\n" % (len(event), event)


def generate_chunks(reply: Reply, gap_s: float, interval: int, label: str) -> Chunks:
    """A generation, `interval` tokens in a chunk."""
    size = len(reply.ids)
    tails: list[tuple[bytes, ...]] = []
    for start in range(0, size, interval):
        ids = reply.ids[start : start + interval]
        finish = _engine_finish(reply) if start + interval >= size else None
        tails.append((_generate_tail(ids, finish, label, size),))
    return Chunks(b'{"request_id":"', tails, gap_s * interval)


def chat_chunks(reply: Reply, gap_s: float, *, usage: bool) -> Chunks:
    """A chat's reply, a token in a chunk; the role comes with the first one, the usage (if it is asked for) with the last."""
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
    return Chunks(b'{"id":"', tails, gap_s)


def generate_whole(reply: Reply, name: str, label: str) -> dict[str, Any]:
    """A generation that is not streamed."""
    return {
        "request_id": name,
        "choices": [_generated(reply.ids, _engine_finish(reply), label, len(reply.ids))],
    }


def chat_whole(reply: Reply) -> dict[str, Any]:
    """A chat's answer that is not streamed."""
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
    """A JSON object without its beginning: what follows the id."""
    return b'",' + orjson.dumps(value)[1:]


def _usage(reply: Reply) -> dict[str, int]:
    return {"prompt_tokens": 16, "completion_tokens": len(reply.ids), "total_tokens": 16 + len(reply.ids)}


def _engine_finish(reply: Reply) -> str:
    """An engine knows no tool calls: a turn stops."""
    return "length" if reply.finish == "length" else "stop"
