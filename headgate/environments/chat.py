"""Chat completions for the environments that bring no agent of their own. Needs httpx."""

from __future__ import annotations

from typing import Any

import httpx

MODEL = "policy"
"""The requested name; an episode's key decides which model responds."""


class ContextFull(Exception):
    """The conversation is longer than the model reads."""


class Chat:
    """One pool of connections for all episodes."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._http: httpx.AsyncClient | None = None

    async def open(self) -> None:
        """Open the pool."""
        self._http = httpx.AsyncClient(timeout=self._timeout_s, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            await self._http.aclose()

    async def complete(self, base_url: str, api_key: str, **body: Any) -> dict[str, Any]:
        """One chat completion. Raise ContextFull, and httpx's errors for anything else than a response."""
        assert self._http is not None, "open it first"
        response = await self._http.post(
            f"{base_url}/chat/completions",
            json={"model": MODEL, **body},
            headers={"Authorization": f"Bearer {api_key}"},
        )
        if response.status_code == httpx.codes.BAD_REQUEST and "context_length_exceeded" in response.text:
            raise ContextFull(response.text[:500])
        if response.is_error:
            raise RuntimeError(f"the gateway responded with {response.status_code}: {response.text[:500]}")
        completion: dict[str, Any] = response.json()
        return completion


def text_of(reply: dict[str, Any]) -> str:
    """Return the text of a chat completion's first choice."""
    return reply["choices"][0]["message"].get("content") or ""
