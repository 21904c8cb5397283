"""An engine that says what a test wrote, and a gateway before it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.engines.fake import FakeEngine, create_fake_app
from processes.ports import free_port
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
    """Says the texts in `replies`, one a request, up to the barrier of `hold_after`; keeps what it was asked in `requests`."""

    def __init__(self) -> None:
        super().__init__("none")
        self.encode: Callable[[str], list[int]] = lambda _text: []
        self.replies: deque[str] = deque()
        self.requests: list[dict[str, Any]] = []

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(body)
        params = body["sampling_params"]
        end = params["stop_token_ids"][-1]
        ids = [*self.encode(self.replies.popleft()), end][: params["max_tokens"]]
        for count, token in enumerate(ids, 1):
            await asyncio.sleep(self.faults.delay_s)
            while self.faults.hold_after is not None and count > self.faults.hold_after:
                await self._changed.wait()
            last = count == len(ids)
            yield {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [{"token_id": token, "logprob": -count / 64, "rank": 1}]},
                "finish_reason": ("stop" if token == end else "length") if last else None,
                "weight_versions": [{"version": self.label, "start": 0, "end": count}] if last else None,
            }


@asynccontextmanager
async def scripted_gateway(
    model: Path, work: Path, **overrides: Any
) -> AsyncIterator[tuple[RunningGateway, ScriptedEngine]]:
    """A gateway before a scripted engine."""
    engine, port = ScriptedEngine(), free_port()
    external = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
    values = settings_for(model, work, engine=external, **overrides)
    async with (
        serve(create_fake_app(engine), port),
        run_gateway(values, in_process=False) as gateway,
    ):
        backend = gateway.model.renderer.backend
        engine.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        yield gateway, engine
