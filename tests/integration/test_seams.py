"""A call that is broken at a random token and continues has the reply of an unbroken one, for every kind of request."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness.agents import sdk
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.records import nodes_of
from tests.harness.scripted import TOOL_CALL, TOOLS, ScriptedEngine
from tests.harness.waiting import turns

LONG_TEXT = "one two three, émile and 漢字 🙂 too\n\nand a second paragraph without an end"


class BreakingEngine(ScriptedEngine):
    """Sample `text`, continue it where a continued request stopped, and return every request after a few tokens."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.text = ""
        self.prompt = 0
        self.breaks = 0
        self.rng = random.Random(seed) if seed is not None else None

    def begin(self, text: str) -> None:
        self.text, self.prompt, self.breaks = text, 0, 0

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        params, given = body["sampling_params"], len(body["token_ids"])
        self.requests.append(body)
        self.prompt = self.prompt or given
        whole = [*self.encode(self.text), params["stop_token_ids"][-1]]
        left = whole[given - self.prompt :][: params["max_tokens"]]
        cut = self.rng.randrange(1, 5) if self.rng else len(left)
        for i, token in enumerate(left[:cut], 1):
            await turns(1)
            last, ended = i == min(cut, len(left)), token == whole[-1]
            finish = ("stop" if ended else "length") if i == len(left) else "abort" if last else None
            self.breaks += finish == "abort"
            yield {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1}]},
                "finish_reason": finish,
                "weight_versions": [{"version": self.label, "start": 0, "end": i}] if finish else None,
            }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (LONG_TEXT, {}),
    "reasoning": (f"<think>\nI think {LONG_TEXT}\n</think>\n\nand so", {}),
    "tool_call": (f"first\n{TOOL_CALL}\n{TOOL_CALL}", {"tools": TOOLS}),
    "reasoning_and_tool": (f"<think>\nhm\n</think>\n\n{TOOL_CALL}", {"tools": TOOLS}),
    "stop_string": (LONG_TEXT, {"stop": ["second para", "nowhere"]}),
    "stop_across_characters": (LONG_TEXT, {"stop": "字 🙂"}),
    "max_tokens": (LONG_TEXT, {"max_tokens": 17}),
    "temperature": (LONG_TEXT, {"temperature": 0.7}),
    "top_p": (LONG_TEXT, {"top_p": 0.8}),
    "logprobs": (LONG_TEXT, {"logprobs": True}),
}


async def ask(
    gateway: RunningGateway, stream: bool, body: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """Return the client's response without what differs from call to call, and the recorded nodes."""
    opened = await gateway.admin.open_episode("task", mode="eval")
    question: Any = [{"role": "user", "content": "hi"}]
    async with sdk(opened) as client:
        request: Any = client.chat.completions.create(model="m", messages=question, stream=stream, **body)
        choice = await joined(await request) if stream else (await request).choices[0].model_dump()
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    reply = {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "logprobs": [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])],
        "finish": choice["finish_reason"],
    }
    return reply, await nodes_of(gateway, opened.episode_id)


async def joined(stream: Any) -> dict[str, Any]:
    """The choice that a stream's events make together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    entries, finish = [], None
    async for chunk in stream:
        for choice in chunk.model_dump()["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
            entries += (choice.get("logprobs") or {}).get("content") or []
            finish = choice["finish_reason"] or finish
    return {"message": message, "logprobs": {"content": entries}, "finish_reason": finish}


@pytest.mark.parametrize("stream", [False, True])
async def test_broken_calls_have_the_replies_of_unbroken_ones(
    tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    steady, breaking = BreakingEngine(None), BreakingEngine(20261121)
    responses: dict[str, list[Any]] = {name: [] for name in CASES}
    for engine in (steady, breaking):
        port = free_port()
        external = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
        values = settings_for(tiny_model, tmp_path / f"{port}", engine=external)
        async with serve(create_fake_app(engine), port), run_gateway(values, in_process=False) as gateway:
            backend = gateway.model.renderer.backend
            engine.encode = lambda text, b=backend: b.encode(text, add_special_tokens=False).ids  # type: ignore[misc]
            for name, (text, body) in CASES.items():
                engine.begin(text)
                choice, nodes = await ask(gateway, stream, body)
                assert engine.breaks >= 3 or engine is steady
                responses[name].append(
                    (choice, nodes[-1]["ids"], nodes[-1]["logprobs"], nodes[-1]["versions"])
                )
            for request in engine.requests:
                params = request["sampling_params"]
                assert params["max_tokens"] >= 1
    for name, (unbroken, broken) in responses.items():
        assert broken == unbroken, name


async def test_the_request_after_a_seam_differs_in_prompt_and_length_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    engine, port = BreakingEngine(1), free_port()
    values = settings_for(
        tiny_model, tmp_path, engine={"launch": "external", "url": f"http://127.0.0.1:{port}"}
    )
    async with serve(create_fake_app(engine), port), run_gateway(values, in_process=False) as gateway:
        backend = gateway.model.renderer.backend
        engine.encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        engine.begin(LONG_TEXT)
        await ask(gateway, True, {"temperature": 0.6, "top_p": 0.9, "max_tokens": 60})
    first, *others = engine.requests
    assert len(others) >= 3
    for request in others:
        sampled = len(request["token_ids"]) - len(first["token_ids"])
        assert request["token_ids"][: len(first["token_ids"])] == first["token_ids"]
        assert request["sampling_params"]["max_tokens"] == 60 - sampled
        same = {k: v for k, v in request["sampling_params"].items() if k != "max_tokens"}
        assert same == {k: v for k, v in first["sampling_params"].items() if k != "max_tokens"}
