"""An engine that replies what a test wrote, and a gateway before it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for

USER = {"role": "user", "content": "hi"}


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class ScriptedEngine(FakeEngine):
    """Reply the texts in `replies`, one a request, up to the barrier of `hold_after`; `requests` has all of them.

    Log-probabilities fall by 1/64 a token.
    """

    def __init__(self) -> None:
        super().__init__("none")
        self.encode: Callable[[str], list[int]] = lambda _text: []
        self.replies: deque[str] = deque()
        self.requests: list[dict[str, Any]] = []

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        params = body["sampling_params"]
        end = params["stop_token_ids"][-1] if params.get("stop_token_ids") else 258
        ids = [*self._reply(body), end][: params["max_tokens"]]
        self._keep(body, ids)
        for count, token in enumerate(ids, 1):
            await asyncio.sleep(self.faults.delay_s)
            while self.faults.hold_after is not None and count > self.faults.hold_after:
                await self._changed.wait()
            last = count == len(ids)
            yield {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [self._entry(token, -count / 64, params)]},
                "finish_reason": ("stop" if token == end else "length") if last else None,
                "weight_versions": [{"version": self.label, "start": 0, "end": count}] if last else None,
            }

    def _reply(self, _body: dict[str, Any]) -> list[int]:
        return self.encode(self.replies.popleft())

    def _keep(self, body: dict[str, Any], _ids: list[int]) -> None:
        self.requests.append(body)

    def _entry(self, token: int, logprob: float, _params: dict[str, Any]) -> dict[str, Any]:
        return {"token_id": token, "logprob": logprob, "rank": 1}


@asynccontextmanager
async def scripted_gateway(
    model: Path, work: Path, **overrides: Any
) -> AsyncIterator[tuple[RunningGateway, ScriptedEngine]]:
    """Yield a gateway before a scripted engine, which computes nothing that a probe could check."""
    engine, port = ScriptedEngine(), free_port()
    external = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
    update = {"probe": False, **overrides.pop("update", {})}
    values = settings_for(model, work, engine=external, update=update, **overrides)
    async with serve(create_fake_app(engine), port), run_gateway(values, in_process=False) as gateway:
        backend = gateway.model.renderer.backend
        engine.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        yield gateway, engine
