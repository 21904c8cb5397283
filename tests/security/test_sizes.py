"""Bounds on every list in a request: a longer one is refused by name before anything else happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.dialects import sizes
from tests.harness.gateways import RunningGateway, run_gateway, settings_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER: dict[str, Any] = {"role": "user", "content": "hi"}
MOST = {"messages": 4, "parts": 8, "tools": 3, "stop": 5, "stop_characters": 300, "logit_bias": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """A gateway with default settings."""
    async with run_gateway(settings_for(tiny_model, tmp_path_factory.mktemp("p"))) as running:
        yield running


@pytest.fixture
def small(plain: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> RunningGateway:
    """The same gateway with small bounds."""
    monkeypatch.setattr(sizes, "MOST", MOST)
    return plain


def function(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}"}}


def parts(count: int, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": "x"}] * count


def called(count: int) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c", **function(0)}] * count}


def many() -> list[tuple[str, dict[str, Any], str, str]]:
    """Requests that hold one too many: path, body, and the parameter and the setting that they name."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts(MOST["parts"])}
    chat, legacy, responses, messages = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    )
    anthropic = {"max_tokens": 4, "messages": [USER]}
    names = [{"name": f"f{i}", "input_schema": {}} for i in range(4)]
    flat = [{"type": "function", "name": f"f{i}"} for i in range(4)]
    space = {"type": "namespace", "name": "n", "tools": flat[1:]}
    return [
        (chat, {"messages": [USER] * 5}, "messages", "messages"),
        (responses, {"input": [USER] * 5}, "input", "messages"),
        ("/v1/responses/input_tokens", {"input": [USER] * 5}, "input", "messages"),
        (messages, {**anthropic, "messages": [USER] * 5}, "messages", "messages"),
        (chat, {"messages": [{"role": "user", "content": parts(9)}]}, "messages", "parts"),
        (chat, {"messages": [USER, called(5), called(4)]}, "messages", "parts"),
        (responses, {"input": [{"role": "user", "content": parts(9, "input_text")}]}, "input", "parts"),
        (messages, {**anthropic, "messages": [{"role": "user", "content": [result]}]}, "messages", "parts"),
        (chat, {"messages": [USER], "tools": [function(i) for i in range(4)]}, "tools", "tools"),
        (responses, {"input": "hi", "tools": flat}, "tools", "tools"),
        (responses, {"input": "hi", "tools": [space]}, "tools", "tools"),
        (messages, {**anthropic, "tools": names}, "tools", "tools"),
        ("/v1/messages/count_tokens", {"messages": [USER], "tools": names}, "tools", "tools"),
        (chat, {"messages": [USER], "stop": ["x"] * 6}, "stop", "stop"),
        (legacy, {"prompt": "hi", "stop": ["x"] * 6}, "stop", "stop"),
        (messages, {**anthropic, "stop_sequences": ["x"] * 6}, "stop_sequences", "stop"),
        (chat, {"messages": [USER], "stop": ["x" * 101] * 3}, "stop", "stop_characters"),
        (chat, {"messages": [USER], "logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias", "logit_bias"),
        (legacy, {"prompt": "hi", "logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias", "logit_bias"),
    ]


async def test_one_too_many_is_refused_with_its_name(small: RunningGateway) -> None:
    _, headers = await small.open(mode="eval")
    for path, body, param, bound in many():
        response = await small.http.post(path, json={"model": "m", **body}, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and f"more than the {MOST[bound]} " in error["message"], (
            path,
            response.text,
        )
        assert error["message"].startswith(param)
        if "/messages" not in path:
            assert (error["code"], error["param"]) == ("too_many", param)


async def test_as_many_as_may_be_are_taken(small: RunningGateway) -> None:
    _, headers = await small.open(mode="eval")
    for body in (
        {"messages": [USER] * 4},
        {"messages": [{"role": "user", "content": parts(8)}]},
        {"messages": [USER], "tools": [function(i) for i in range(3)]},
        {"messages": [USER], "stop": ["0" * 60] * 5},
        {"messages": [USER], "logit_bias": {1: 1, 2: 1}},
    ):
        response = await small.chat(headers, max_tokens=2, **body)
        assert response.status_code == 200, response.text


async def test_the_default_bounds_allow_agents_and_refuse_what_stalls_others(plain: RunningGateway) -> None:
    """Anthropic's 8,191 stop sequences; many tools; but not 400,000 stop strings."""
    assert sizes.MOST["stop"] >= 8191 and sizes.MOST["tools"] >= 1000 and sizes.MOST["messages"] >= 10_000
    _, headers = await plain.open(mode="eval")
    body = {
        "model": "m",
        "max_tokens": 4,
        "messages": [USER],
        "stop_sequences": [f"{i:04x}" for i in range(8191)],
    }
    response = await plain.http.post("/v1/messages", json=body, headers=headers)
    assert response.status_code == 200, response.text
    response = await plain.chat(headers, stop=[f"{i:x}" for i in range(400_000)])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize("wrong", [{f"k{i}": "v" for i in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}])
async def test_metadata_is_bounded_as_openai_bounds_it(plain: RunningGateway, wrong: dict[str, str]) -> None:
    _, headers = await plain.open(mode="eval")
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER], "model": "m", "metadata": wrong}),
        ("/v1/responses", {"input": "hi", "model": "m", "metadata": wrong}),
    ):
        response = await plain.http.post(path, json=body, headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"].startswith("metadata"), (path, response.text)
