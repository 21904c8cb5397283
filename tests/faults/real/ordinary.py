"""Clients that know HTTP: each sends one request after the other, under its own key, and knows its responses by their tags."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.faults.real.tags import Tags, tag

PATIENCE_S = 120.0


class Client:
    """One caller, on connections of its own."""

    def __init__(self, owner: str, kind: str, key: str, url: str, tags: Tags) -> None:
        """Open connections. `kind`: root, agent, episode or stranger."""
        self._owner = owner
        self._kind = kind
        self._tags = tags
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S)
        self._number = 0

    async def run(self, seed: str, over: Callable[[], bool]) -> None:
        """Send requests until `over` returns True."""
        rng = random.Random(seed)
        acts: dict[str, tuple[Callable[[str], Awaitable[None]], ...]] = {
            "root": (self._no_episode, self._no_route, self._no_reward, self._no_deletion, self._life),
            "agent": (self._no_model, self._no_response, self._respond, self._stream),
            "episode": (self._respond, self._stream, self._no_response),
            "stranger": (self._refused,),
        }
        async with self._http:
            while not over():
                self._number += 1
                await rng.choice(acts[self._kind])(tag(self._owner, self._number))

    async def _send(
        self, own: str, method: str, path: str, *statuses: int, repeats: bool = True, **more: Any
    ) -> httpx.Response | None:
        """Send one request. `repeats`: the response has the tag."""
        kind = f"{self._kind} {method} {path.replace(own, 'TAG')}"
        try:
            response = await self._http.request(method, path, **more)
        except httpx.HTTPError as error:
            self._tags.check_missing(kind, own, repr(error))
            return None
        content = response.content if repeats else response.content + own.encode()
        self._tags.check_ordinary(kind, own, statuses, response.status_code, content)
        return response

    async def _no_episode(self, own: str) -> None:
        await self._send(own, "GET", f"/admin/v1/episodes/{own}", 404)

    async def _no_route(self, own: str) -> None:
        await self._send(own, "GET", f"/admin/v1/{own}", 404)

    async def _no_reward(self, own: str) -> None:
        await self._send(own, "POST", f"/admin/v1/episodes/{own}/reward", 404, json={"reward": 1.0})

    async def _no_deletion(self, own: str) -> None:
        await self._send(own, "DELETE", f"/admin/v1/episodes/{own}", 404)

    async def _life(self, own: str) -> None:
        """Open and end an episode. The response to the opening has no tag; that of the opened episode has."""
        path, body = "/admin/v1/episodes", {"task_id": own, "mode": "eval"}
        opened = await self._send(own, "POST", path, 200, repeats=False, json=body)
        if opened is None or opened.status_code != 200:
            return
        try:
            path = f"{path}/{opened.json()['episode_id']}"
        except (ValueError, KeyError):  # a response that opens nothing is another request's
            self._tags.check_ordinary("root POST an episode", own, (200,), 200, opened.content)
            return
        try:
            shown = await self._http.get(path)
            self._tags.check_ordinary("root GET an episode", own, (200,), shown.status_code, shown.content)
            await self._http.post(f"{path}/abandon", json={"reason": own})
        except httpx.HTTPError as error:
            self._tags.check_missing("root GET an episode", own, repr(error))

    async def _no_model(self, own: str) -> None:
        body = {"model": own, "messages": [{"role": "user", "content": "hi"}]}
        await self._send(own, "POST", "/v1/chat/completions", 404, json=body)

    async def _no_response(self, own: str) -> None:
        await self._send(own, "GET", f"/v1/responses/{own}", 404)

    async def _respond(self, own: str, **more: Any) -> None:
        body = {"model": "demo", "input": "hi", "metadata": {"own": own}, "max_output_tokens": 4, **more}
        await self._send(own, "POST", "/v1/responses", 200, json=body)

    async def _stream(self, own: str) -> None:
        await self._respond(own, stream=True)

    async def _refused(self, own: str) -> None:
        await self._send(own, "GET", f"/admin/v1/episodes/{own}", 401)
