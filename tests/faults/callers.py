"""Calls by the openai package, recorded in a transcript. Nothing is judged here.

Every question names itself, `[ask:...]`, so the prompts that engines and the database have can be compared with the transcript. A
question that is sent again by the package itself, or with the same idempotency key, keeps its name; any other is a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from tests.faults.evidence import Journal

FAILURES = (openai.OpenAIError, httpx.HTTPError, OSError)


@dataclass(frozen=True, slots=True)
class Call:
    """One request. Its last message is the question."""

    ask: str
    """The question's name."""
    episode: str
    messages: list[dict[str, str]]
    tokens: int
    streamed: bool
    attempt: int = 0
    key: str = ""
    """An idempotency key."""
    stored: bool = False
    leave_after: int = 0
    """The number of tokens after which the client leaves; 0: it stays."""

    @property
    def body(self) -> dict[str, Any]:
        """Return the arguments of the SDK."""
        headers = {"extra_headers": {"Idempotency-Key": self.key}} if self.key else {}
        body = {"model": "any", "messages": self.messages, "max_tokens": self.tokens, "store": self.stored}
        return body | headers


@dataclass(frozen=True, slots=True)
class Response:
    """A whole reply."""

    id: str
    text: str


class Caller:
    """Send calls, and record what was sent and received."""

    def __init__(
        self, journal: Journal, token_s: float = 0.0, on_chunk: Callable[[], None] = lambda: None
    ) -> None:
        """`token_s`: the engines' time for a token, by which a client leaves a reply that is not streamed."""
        self._journal = journal
        self._token_s = token_s
        self._on_chunk = on_chunk

    async def send(self, client: openai.AsyncOpenAI, call: Call) -> Response | None:
        """Return the whole reply, or None if it broke off or the client left. Raise one of `FAILURES`."""
        known = {"ask": call.ask, "attempt": call.attempt, "episode": call.episode, "key": call.key}
        self._journal.write("ask", **known, stream=call.streamed, tokens=call.tokens)

        def end(how: str, **values: Any) -> None:
            self._journal.write("end", **known, how=how, **values)

        try:
            return await (self._stream if call.streamed else self._whole)(client, call, end)
        except FAILURES as error:
            end("broken", error=f"{type(error).__name__}: {str(error)[:300]}")
            raise

    async def _whole(
        self, client: openai.AsyncOpenAI, call: Call, end: Callable[..., None]
    ) -> Response | None:
        try:
            async with asyncio.timeout(call.leave_after * self._token_s or None) as limit:
                response = await client.chat.completions.create(**call.body)
        except TimeoutError:
            if not limit.expired():
                raise
            end("hung_up")
            return None
        choice = response.choices[0]
        text = choice.message.content or ""
        end("finished", id=response.id, text=text, finish=choice.finish_reason)
        return Response(response.id, text)

    async def _stream(
        self, client: openai.AsyncOpenAI, call: Call, end: Callable[..., None]
    ) -> Response | None:
        text, finish, name, chunks = "", None, "", 0
        async with await client.chat.completions.create(**call.body, stream=True) as stream:
            async for chunk in stream:
                chunks += 1
                name = chunk.id
                self._on_chunk()
                for choice in chunk.choices:
                    if piece := choice.delta.content or "":
                        text += piece
                        self._journal.write("chunk", ask=call.ask, attempt=call.attempt, id=name, text=piece)
                    finish = choice.finish_reason or finish
                if call.leave_after and chunks >= call.leave_after and finish is None:
                    end("hung_up", id=name)
                    return None
        if finish is None:  # the package reports nothing for a stream that merely ends
            end("broken", id=name, error="the stream ended without a finish reason")
            return None
        end("finished", id=name, text=text, finish=finish)
        return Response(name, text)


def question(ask: str, words: str = "count!") -> dict[str, str]:
    """Return a message that names itself."""
    return {"role": "user", "content": f"[ask:{ask}] {words}"}
