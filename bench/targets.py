"""Ways to the same engine, as load targets: its token API, and the chat or messages API of it or of what stands before it.

All send the same request: the direct request carries the token ids that the gateway renders from the same message, and the
sampling parameters that the gateway passes on. Where the engine's reply is known (`bench.replies`), a response that lost or
changed a word of it is a failed request.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import orjson

from bench.load import RequestFailed
from bench.replies import ARGUMENTS, MESSAGES_TOOLS, TOOLS, Reply
from gateway.config import ModelSettings
from gateway.render.renderer import ChatRenderer
from headgate.client import GatewayClient

_PROMPTS = 2048
_EPISODES = 256
_STRIDE = 64
"""So many streams share no episode."""
_OPENED_AT_ONCE = 16
_TEMPERATURE = 1.0
_WITH_TOKENS = re.compile(rb'"token_ids":\s*\[\s*\d')


@dataclass(frozen=True, slots=True)
class Prompts:
    """Short messages, and each as the token ids that the gateway makes of it."""

    texts: list[str]
    ids: list[list[int]]
    stop: list[int]

    @classmethod
    def load(cls, model: Path) -> Prompts:
        """Render them once, so that no measurement has to."""
        renderer = ChatRenderer.load(ModelSettings(path=model))
        random = Random(0)  # lengths differ, because the fake engine's reply depends on a prompt's length
        texts = [f"message {n}: write" + " something" * random.randrange(1, 25) for n in range(_PROMPTS)]
        texts = [text + "!" * random.randrange(10) for text in texts]
        ids = [renderer.render([{"role": "user", "content": text}], []) for text in texts]
        return cls(texts, ids, sorted(renderer.marks.stop))


class DirectTarget:
    """The engine's `/inference/v1/generate`."""

    name = "direct"

    def __init__(self, port: int, prompts: Prompts) -> None:
        self.port = port
        self._prompts = prompts
        self._numbers = count()

    def request(self, stream: int, max_tokens: int, streamed: bool) -> bytes:
        number = next(self._numbers)
        params = {
            "temperature": _TEMPERATURE,
            "top_p": 1.0,
            "max_tokens": max_tokens,
            "logprobs": 0,
            "stop_token_ids": self._prompts.stop,
            "detokenize": False,
        }
        body = {
            "request_id": f"bench-{number}",
            "token_ids": self._prompts.ids[number % len(self._prompts.ids)],
            "sampling_params": params,
            "stream": streamed,
        }
        return post("/inference/v1/generate", body)

    def begins(self, body: bytes, streamed: bool) -> bool:
        return not streamed or _WITH_TOKENS.search(body) is not None

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        if streamed:
            events = _whole(events)
        tokens = [len(_choice(event)["token_ids"]) for event in events]
        return sum(1 for n in tokens if n), sum(tokens)


@dataclass(frozen=True, slots=True)
class ChatKind:
    """A chat request without its message."""

    tools: bool = False
    logprobs: bool = False
    reply: Callable[[int], Reply] | None = None
    """The engine's reply to a request for a number of tokens, if that is known."""
    model: str = "bench"


class ChatTarget:
    """An OpenAI-compatible `/v1/chat/completions`.

    Each stream, which keeps its connection as an agent does, has keys of its own if there are enough, and uses them in turn.
    Chunks are events with text, reasoning or a part of a tool call: the first, which names the role, is none.
    """

    _path = "/v1/chat/completions"
    _begun = re.compile(rb'"(?:content|reasoning_content|reasoning|arguments|name)":\s*"[^"]')

    def __init__(
        self, name: str, port: int, prompts: Prompts, keys: Sequence[str] = (), kind: ChatKind | None = None
    ) -> None:
        self.name = name
        self.port = port
        self._prompts = prompts
        self._keys = keys or [""]
        self._kind = kind or ChatKind()
        self._numbers = count()
        self._turns = Counter[int]()

    def request(self, stream: int, max_tokens: int, streamed: bool) -> bytes:
        number = next(self._numbers)
        key = self._keys[(stream + _STRIDE * self._turns[stream]) % len(self._keys)]
        self._turns[stream] += 1
        body: dict[str, Any] = {
            "model": self._kind.model,
            "messages": [{"role": "user", "content": self._prompts.texts[number % len(self._prompts.texts)]}],
            "temperature": _TEMPERATURE,
            "max_tokens": max_tokens,
            "stream": streamed,
        }
        return post(self._path, body | self._options(streamed), key)

    def begins(self, body: bytes, streamed: bool) -> bool:
        return not streamed or self._begun.search(body) is not None

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        deltas, tokens = self._read(events, streamed)
        deltas = [delta for delta in deltas if any(delta.get(field) for field in _TEXT)]
        if self._kind.reply is not None:
            _check(deltas, self._kind.reply(tokens))
        return len(deltas) if streamed else min(len(deltas), 1), tokens

    def _options(self, streamed: bool) -> dict[str, Any]:
        """Return the part of a request that is this API's own."""
        options: dict[str, Any] = {}
        if streamed:
            options["stream_options"] = {"include_usage": True}
        if self._kind.tools:
            options["tools"] = TOOLS
        if self._kind.logprobs:
            options["logprobs"] = True
        return options

    def _read(self, events: list[bytes], streamed: bool) -> tuple[list[dict[str, Any]], int]:
        """Return the response in the form of a chat's deltas, and its number of tokens."""
        if streamed:
            return _deltas(_whole(events))
        response = orjson.loads(events[0])
        return [response["choices"][0]["message"]], response["usage"]["completion_tokens"]


class MessagesTarget(ChatTarget):
    """Anthropic's `/v1/messages`. Chunks are events with text, thinking or a part of a tool's input."""

    _path = "/v1/messages"
    _begun = re.compile(rb'"(?:text|thinking|partial_json)":\s*"[^"]')

    def _options(self, streamed: bool) -> dict[str, Any]:
        return {"tools": MESSAGES_TOOLS, "thinking": {"type": "adaptive"}} if self._kind.tools else {}

    def _read(self, events: list[bytes], streamed: bool) -> tuple[list[dict[str, Any]], int]:
        if streamed:
            return _block_deltas(events)
        response = orjson.loads(events[0])
        return [_delta_of(block) for block in response["content"]], response["usage"]["output_tokens"]


class GatewayTarget(ChatTarget):
    """The gateway's `/v1/chat/completions`.

    Calls are spread over many episodes, so that none becomes much longer than an agent's: a gateway's work for a call grows with
    the earlier calls of its episode.
    """

    def __init__(
        self, port: int, prompts: Prompts, keys: Sequence[str], kind: ChatKind | None = None
    ) -> None:
        super().__init__("gateway", port, prompts, keys, kind)

    @classmethod
    async def open(cls, port: int, prompts: Prompts, kind: ChatKind | None = None) -> GatewayTarget:
        """Open the episodes."""
        return cls(port, prompts, await open_episodes(port), kind)


async def open_episodes(port: int, number: int = _EPISODES) -> list[str]:
    """Return the keys of N new episodes."""
    limit = asyncio.Semaphore(_OPENED_AT_ONCE)
    async with GatewayClient(f"http://127.0.0.1:{port}") as client:

        async def key(number: int) -> str:
            async with limit:
                return (await client.open_episode(f"bench-{number}", mode="eval")).api_key

        return await asyncio.gather(*(key(n) for n in range(number)))


_TEXT = ("content", "reasoning_content", "reasoning", "tool_calls")


def _deltas(events: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the deltas, and the number of tokens by the response's usage."""
    deltas, usage = [], None
    for event in events:
        value = orjson.loads(event)
        if "error" in value:
            raise RequestFailed(event[:200].decode(errors="replace"))
        usage = value.get("usage") or usage
        deltas += [choice.get("delta") or {} for choice in value.get("choices", ())]
    if usage is None:
        raise RequestFailed("a stream without its usage")
    return deltas, usage["completion_tokens"]


def _block_deltas(events: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return a message's deltas as a chat's, and the number of tokens by the response's usage."""
    deltas: list[dict[str, Any]] = []
    tokens, value = None, {}
    for event in events:
        value = orjson.loads(event)
        if "error" in value:
            raise RequestFailed(event[:200].decode(errors="replace"))
        if value["type"] == "content_block_delta":
            deltas.append(_delta_of(value["delta"]))
        elif value["type"] == "message_delta":
            tokens = value["usage"]["output_tokens"]
    if tokens is None or value["type"] != "message_stop":
        raise RequestFailed(f"a stream ended early, with {value.get('type', 'nothing')}")
    return deltas, tokens


def _delta_of(block: dict[str, Any]) -> dict[str, Any]:
    """Return a message's block, or a delta of one, as a chat's delta."""
    match block:
        case {"type": "text" | "text_delta", "text": text}:
            return {"content": text}
        case {"type": "thinking" | "thinking_delta", "thinking": text}:
            return {"reasoning_content": text}
        case {"type": "tool_use", "input": given}:
            return {"tool_calls": [{"function": {"arguments": orjson.dumps(given).decode()}}]}
        case {"type": "input_json_delta", "partial_json": text} if text:
            return {"tool_calls": [{"function": {"arguments": text}}]}
    return {}


def _check(deltas: list[dict[str, Any]], reply: Reply) -> None:
    """Raise RequestFailed unless the deltas make up the reply; blanks at the ends of a part are the template's."""
    for names in (("content",), ("reasoning_content", "reasoning")):
        received = "".join(next((d[n] for n in names if d.get(n)), "") for d in deltas)
        if received.strip() != reply.joined(names[0]).strip():
            raise RequestFailed(f"wrong {names[0]}: {received[:80]!r}")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call.get("arguments") or "" for call in calls)
    if reply.finish == "tool_calls" and (not arguments or orjson.loads(arguments) != orjson.loads(ARGUMENTS)):
        raise RequestFailed(f"wrong arguments: {arguments[:80]!r}")


def _whole(events: list[bytes]) -> list[bytes]:
    if len(events) < 2 or events[-1] != b"[DONE]":
        last = events[-1][:200].decode(errors="replace") if events else "nothing"
        raise RequestFailed(f"a stream ended early, with {last}")
    return events[:-1]


def _choice(event: bytes) -> dict[str, Any]:
    value = orjson.loads(event)
    if not value.get("choices"):
        raise RequestFailed(f"no choices in {event[:200].decode(errors='replace')}")
    choice: dict[str, Any] = value["choices"][0]
    return choice


def post(path: str, body: dict[str, Any], key: str = "") -> bytes:
    """Return a whole HTTP request."""
    content = orjson.dumps(body)
    bearer = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{bearer}"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
