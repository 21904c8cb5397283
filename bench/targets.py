"""The two ways to the same engine, as load targets: its own API, and the gateway's.

Both ask for the same: the direct request carries the token ids that the gateway renders from the same message, and the sampling
parameters that the gateway passes on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import orjson

from bench.load import RequestFailed
from gateway.client import GatewayClient
from gateway.render.renderer import ChatRenderer
from gateway.settings import ModelSettings

_PROMPTS = 2048
_EPISODES = 256
_OPENED_AT_ONCE = 16
_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class Prompts:
    """Short messages, and each as the token ids that the gateway makes of it."""

    texts: list[str]
    ids: list[list[int]]
    stop: list[int]

    @classmethod
    def load(cls, model: Path) -> Prompts:
        """Renders them once, so that no measurement has to."""
        renderer = ChatRenderer.load(ModelSettings(path=model))
        random = Random(0)  # lengths differ, because what the fake engine says depends on a prompt's length
        texts = [f"message {n}: say" + " something" * random.randrange(1, 25) for n in range(_PROMPTS)]
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
        """See `Target`."""
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
            "token_ids": self._prompts.ids[number % _PROMPTS],
            "sampling_params": params,
            "stream": streamed,
        }
        return _post("/inference/v1/generate", body)

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        """See `Target`."""
        if streamed:
            events = _whole(events)
        tokens = [len(_choice(event)["token_ids"]) for event in events]
        return sum(1 for n in tokens if n), sum(tokens)


class GatewayTarget:
    """The gateway's `/v1/chat/completions`.

    Requests go in turn through so many open episodes that none becomes much longer than an agent's: a gateway's work for a call
    grows with the calls that its episode has had.
    """

    name = "gateway"

    def __init__(self, port: int, prompts: Prompts, keys: list[str]) -> None:
        self.port = port
        self._prompts = prompts
        self._keys = keys
        self._numbers = count()

    @classmethod
    async def open(cls, port: int, prompts: Prompts) -> GatewayTarget:
        """Opens the episodes."""
        limit = asyncio.Semaphore(_OPENED_AT_ONCE)
        async with GatewayClient(f"http://127.0.0.1:{port}") as client:

            async def key(number: int) -> str:
                async with limit:
                    return (await client.open_episode(f"bench-{number}", mode="eval")).api_key

            keys = await asyncio.gather(*(key(number) for number in range(_EPISODES)))
        return cls(port, prompts, keys)

    def request(self, stream: int, max_tokens: int, streamed: bool) -> bytes:
        """See `Target`."""
        number = next(self._numbers)
        body: dict[str, Any] = {
            "model": "bench",
            "messages": [{"role": "user", "content": self._prompts.texts[number % _PROMPTS]}],
            "temperature": _TEMPERATURE,
            "max_tokens": max_tokens,
            "stream": streamed,
        }
        if streamed:
            body["stream_options"] = {"include_usage": True}
        return _post("/v1/chat/completions", body, self._keys[number % len(self._keys)])

    def count(self, events: list[bytes], streamed: bool) -> tuple[int, int]:
        """See `Target`: chunks are those with text; the first, which names the role, is none."""
        if not streamed:
            return 1, orjson.loads(events[0])["usage"]["completion_tokens"]
        *chunks, usage = _whole(events)
        with_text = sum(
            1 for chunk in chunks if any((_choice(chunk).get("delta") or {}).get(f) for f in _TEXT)
        )
        return with_text, orjson.loads(usage)["usage"]["completion_tokens"]


_TEXT = ("content", "reasoning_content")


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


def _post(path: str, body: dict[str, Any], key: str = "") -> bytes:
    content = orjson.dumps(body)
    bearer = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\n{bearer}"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
