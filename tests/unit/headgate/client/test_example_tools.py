"""The example agent against a scripted model behind a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from headgate.client.agents import load_agent, read_tasks
from tests.harness.waiting import until

TOOLS = Path(__file__).parents[4] / "examples" / "tools"


class Model:
    """Streams the next of its `replies`: a text, or a list of (tool, arguments)."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: list[str | list[tuple[str, str]]] = []
        self.requests: list[dict[str, Any]] = []

    async def complete(self, request: Request) -> StreamingResponse:
        assert request.headers["authorization"] == "Bearer key-1"
        self.requests.append(await request.json())
        reply = self.replies.pop(0)
        deltas = [{"content": c} for c in reply] if isinstance(reply, str) else _call_deltas(reply)
        return StreamingResponse(_events(deltas), media_type="text/event-stream")


def _call_deltas(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    deltas = []
    for i, (name, arguments) in enumerate(calls):
        head = {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": ""}}
        parts = [head, *({"function": {"arguments": c}} for c in arguments)]
        deltas += [{"tool_calls": [{"index": i, **part}]} for part in parts]
    return deltas


async def _events(deltas: list[dict[str, Any]]) -> AsyncIterator[str]:
    for delta in [*deltas, {}]:
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
        yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    model = Model()
    app = FastAPI()
    app.post("/v1/chat/completions")(model.complete)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(), name="model")
    await until(lambda: server.started, "the model listens")
    model.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    yield model
    server.should_exit = True
    await serving


def call(name: str, **arguments: str) -> tuple[str, str]:
    return name, json.dumps(arguments)


@pytest.mark.parametrize(
    ("replies", "reward", "answers"),
    [
        (
            [[call("price", item="tea")], [call("calculate", expression="2 * 3.5")], "It is 7.00"],
            1.0,
            ["3.5", "7"],
        ),
        ([[call("price", item="tea"), call("price", item="milk")], "8"], 0.1, ["3.5", "1.2"]),
        (["7"], 1.0, []),
        (["I do not know"], 0.0, []),
        ([[("price", "{item: tea")], [("steal", "{}")], "7"], 1.0, ["Error: JSON", "Error: there is no"]),
        ([[("price", "[]")], [call("calculate", expression="(")], ""], 0.1, ["Error: ", "Error: "]),
        ([[call("price", item="tea")]] * 4, 0.1, ["3.5"] * 3),
    ],
)
async def test_an_episode(model: Model, replies: list[Any], reward: float, answers: list[str]) -> None:
    model.replies = list(replies)
    agent, task = load_agent(f"{TOOLS / 'agent.py'}:solve"), read_tasks(TOOLS / "tasks.jsonl")[0]
    assert (await agent(task, model.url, "key-1")).reward == reward
    assert not model.replies
    results = [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert len(results) == len(answers)
    assert all(t.startswith(a) for t, a in zip(results, answers, strict=True))


def test_the_totals_are_right() -> None:
    tasks = read_tasks(TOOLS / "tasks.jsonl")
    assert len(tasks) == 12
    for task in tasks:
        order = task.data["question"].removeprefix("What do ").removesuffix(" cost together?")
        items = [part.split(" x ") for part in order.split(" and ")]
        total = sum(int(n) * task.data["prices"][item] for n, item in items)
        assert total == pytest.approx(task.data["total"])
