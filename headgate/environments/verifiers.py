"""Environments of the verifiers package (`verifiers.v1`): its tasksets, harnesses and rewards, played by its own machinery.

`verifiers:NAME`, where NAME is a taskset that the environment's Python can import. Arguments: the fields of the run's `[env]`
block in verifiers' own configuration, such as `{"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}`, and
- `model`: the model that its requests name;
- `sampling`: verifiers' sampling settings, such as `{"max_tokens": 512}`.

An episode's reward is the sum of the rewards of those traces that are trainable. An episode that verifiers calls not ok
(an error in a tool, a sandbox, a scorer, the harness) has failed; its reward is not 0.

Verifiers keeps a client for each endpoint for ever, so all episodes have one endpoint here: a relay that knows each trace's
episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.types import Sampling
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from headgate.environments.base import (
    Found,
    Played,
    PlayFailed,
)

_REASONS = {"ToolsetError": "tool_failed", "TaskError": "grading_failed", "SandboxError": "sandbox_failed"}
"""Reasons of failures by verifiers' names for the errors."""
_BODY_BYTES = 2**28


class VerifiersEnvironment:
    """The taskset `name`, with the `[env]` block `block`."""

    def __init__(
        self, name: str, model: str = "policy", sampling: dict[str, Any] | None = None, **block: Any
    ) -> None:
        taskset = {**block.pop("taskset", {}), "id": name}
        self._environment: Any = load_environment(resolve_env_config({**block, "taskset": taskset}))
        self._model = model
        self._sampling = Sampling(**(sampling or {}))
        self._tasks: dict[int, Any] = {}
        self._rest: Iterator[Any] | None = None
        self._relay = _Relay()
        self._opened = AsyncExitStack()

    def tasks(self) -> Iterator[Found]:
        for index, task in enumerate(self._environment.taskset):
            content = task.data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
            yield Found(json.dumps(content, sort_keys=True), {"index": index})

    async def open(self) -> None:
        await self._relay.open(self._opened)
        await self._opened.enter_async_context(self._environment.serving())

    async def play(self, data: dict[str, Any], base_url: str, api_key: str) -> Played:
        client = vf.EvalClientConfig(base_url=self._relay.url, api_key_var="HEADGATE_RELAY")
        context = ModelContext(model=self._model, client=client, sampling=self._sampling)
        (slot,) = self._environment.slots(self._task(data["index"]))
        minted: list[str] = []

        def route(trace: Any) -> None:
            minted.append(trace.id)
            self._relay.routes[trace.id] = (base_url, api_key)

        try:
            episode = await self._environment.run_slot(slot, context, on_trace=route)
        finally:
            for trace_id in minted:
                del self._relay.routes[trace_id]
        return _played(episode)

    def _task(self, index: int) -> Any:
        """Return the task at a place of the dataset, which is read as far as that."""
        if self._rest is None:
            self._rest = iter(self._environment.taskset)
        while index not in self._tasks:
            self._tasks[len(self._tasks)] = next(self._rest)
        return self._tasks[index]

    async def close(self) -> None:
        await self._opened.aclose()


class _Relay:
    """Passes a trace's calls on to its episode, byte by byte."""

    def __init__(self) -> None:
        self.url = ""
        self.routes: dict[str, tuple[str, str]] = {}
        """The base URL and the key of each trace's episode."""

    async def open(self, stack: AsyncExitStack) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        )
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        route = self.routes.get(request.headers.get(SESSION_ID_HEADER, ""))
        if route is None:
            return web.json_response({"error": {"message": "the trace has ended"}}, status=409)
        headers = {"Authorization": f"Bearer {route[1]}", "Content-Type": "application/json"}
        url = f"{route[0]}/{request.match_info['path']}"
        async with self._http.post(url, data=await request.read(), headers=headers) as upstream:
            returned = {
                name: upstream.headers[name]
                for name in ("Content-Type", "Retry-After")
                if name in upstream.headers
            }
            response = web.StreamResponse(status=upstream.status, headers=returned)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
        return response


def _played(episode: Any) -> Played:
    """Return the rewards of an episode. Raise PlayFailed if it is not ok."""
    if not episode.ok:
        last = next((at.last_error for at in (episode, *episode.traces) if at.last_error is not None), None)
        if last is None:
            raise PlayFailed("verifiers calls the episode not ok, and names no error")
        raise PlayFailed(f"{last.type}: {last.message}", _REASONS.get(last.type, "environment_failed"))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    components: dict[str, float] = {}
    for trace in trained:
        scores = {name: reward and reward.value for name, reward in trace.rewards.items()}
        given = {**trace.metrics, **scores}.items()
        components |= {name: float(value) for name, value in given if value is not None}
    return Played(float(sum(trace.reward for trace in trained)), components)
