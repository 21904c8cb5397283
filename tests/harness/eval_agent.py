"""An agent for evaluations in processes of their own: small to import, and held where a test wants it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx


async def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Send one request, and return the worth of the task; with a `gate`, a named pipe, wait for a writer first."""
    if gate := task.get("gate"):
        await asyncio.to_thread(Path(gate).read_text)
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60) as http:
        (await http.post("chat/completions", json=body)).raise_for_status()
    return float(task["worth"])
