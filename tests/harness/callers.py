"""Agents with keys of their own, before a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.harness.gateways import RunningGateway
from tests.harness.scripted import ScriptedEngine

KEYS = {name: f"the-key-of-{name}-and-no-other" for name in ("ann", "bob", "few", "brief")}


Stage = tuple[RunningGateway, ScriptedEngine]


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def send(
    stage: Stage, agent: str, messages: Sequence[Any], path: str = "", **more: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS.get(agent, agent)}", **more.pop("headers", {})}
    body = {"model": "m", "messages": messages, **more}
    return await stage[0].http.post(f"{path}/v1/chat/completions", json=body, headers=headers)


async def chat(stage: Stage, agent: str, messages: Sequence[Any], reply: str = "so", **more: Any) -> str:
    """Return the id of the episode of a call with this reply."""
    stage[1].replies.append(reply)
    response = await send(stage, agent, messages, **more)
    assert response.status_code == 200, response.text
    return response.headers["x-headgate-episode"]


async def notice_of(stage: Stage, episode: str) -> str:
    row = await stage[0].admin.episode(episode)
    assert (await stage[0].admin.why(episode))["notice"] == row["notice"]
    return row["notice"]


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
