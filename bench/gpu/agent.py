"""The agent of the check: one question, one long response."""

from __future__ import annotations

import zlib
from typing import Any

import httpx

_RESPONSE_S = 1800.0


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return the response's checksum, between 0 and 1: a reward only has to differ between the members of a group."""
    body = {
        "model": "gpt-4o-mini",
        "max_tokens": task["max_tokens"],
        "messages": [{"role": "user", "content": task["question"]}],
    }
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_RESPONSE_S) as http:
        response = (await http.post("chat/completions", json=body)).raise_for_status().json()
    text = response["choices"][0]["message"]["content"] or ""
    return zlib.crc32(text.encode()) / 2**32
