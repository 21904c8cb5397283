"""What several of these tests need: an engine that says what a test wrote, the truth about the fake one, and waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.engines.fake import FakeEngine, create_fake_app, identity, next_token
from gateway.render.renderer import ChatRenderer
from gateway.types import EpisodeOpened
from scheduler.cluster.local import free_port
from tests.gateways import RunningGateway, run_gateway, serve, settings_for

STOP_TOKENS = [256, 258]
"""What the gateway sends for the tiny tokenizer, in its order."""
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
    """Says the texts in `replies`, one a request; keeps what it was asked in `requests`."""

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


@asynccontextmanager
async def client_of(gateway: RunningGateway, **kwargs: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    """The openai SDK as an agent would use it, in a new episode; and the episode's id."""
    opened = await gateway.admin.open_episode("task", **kwargs)
    async with sdk(opened) as client:
        yield client, opened.episode_id


def sdk(opened: EpisodeOpened, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=max_retries)


async def nodes_of(gateway: RunningGateway, episode_id: str) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = (await gateway.admin.trajectory(episode_id))["nodes"]
    return nodes


def path_to(nodes: Sequence[dict[str, Any]], node: dict[str, Any]) -> list[int]:
    """The token ids from the root to a node, without its own."""
    ids: list[int] = []
    while node["parent"] >= 0:
        parent = nodes[node["parent"]]
        ids = parent["ids"][: node["at"]] + ids
        node = parent
    return ids


def intervals_of(turn: dict[str, Any]) -> list[tuple[int, int]]:
    """The oldest and the newest version that every token may be of."""
    return [(span[0], span[-1 if len(span) > 2 else 0]) for span in turn["versions"] for _ in range(span[1])]


def versions_of(turn: dict[str, Any]) -> list[int]:
    """The version of every token."""
    return [version for version, count in turn["versions"] for _ in range(count)]


def check_sampled_by_the_fake(
    nodes: Sequence[dict[str, Any]],
    turn: dict[str, Any],
    weights: dict[int, Path | str],
    seed: int | None = None,
    *,
    unsure: bool = False,
) -> None:
    """Every token and log-probability is what the weights of its version say after exactly this context.

    `unsure`: of a token that is recorded with several versions, one of them says it.
    """
    context = path_to(nodes, turn)
    intervals = intervals_of(turn)
    assert unsure or all(oldest == newest for oldest, newest in intervals)
    for token, logprob, (oldest, newest) in zip(turn["ids"], turn["logprobs"], intervals, strict=True):
        known = [version for version in weights if oldest <= version <= newest]
        expected = [next_token(identity(str(weights[v])), context, seed, STOP_TOKENS) for v in known]
        assert (token, pytest.approx(logprob, abs=1e-5)) in [(said[0], said[1]) for said in expected]
        context.append(token)


def lasting(model: Any, seed: int | None = None) -> list[dict[str, str]]:
    """A question to which the fake engine's reply takes 60 to 120 tokens; which one that is depends on where the weights are."""
    renderer, weights = ChatRenderer.load(model), identity(str(model.path.resolve()))
    for number in range(1, 400):
        messages = [{"role": "user", "content": "why" * number}]
        context = renderer.render(messages, [])
        for length in range(121):
            if length and context[-1] == STOP_TOKENS[0]:
                break
            context.append(next_token(weights, context, seed, STOP_TOKENS)[0])
        if 60 <= length < 120:
            return messages
    raise AssertionError("no such question")


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
    """Waits for a condition; fails with `what` if it does not come true in time, which is long, for a machine may be slow."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within {timeout_s:g} s: {what}")
