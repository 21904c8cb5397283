"""litellm, the library: the providers whose fields and addresses are OpenAI's, vLLM's, OpenRouter's, Anthropic's and Groq's."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched at import

import litellm

from tests.compat.clients.gate import CITY, HELLO, MODEL, SUNNY, WEATHER, Episode

FIELDS: dict[str, dict[str, Any]] = {
    "openai": {},
    "hosted_vllm": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 20}},
    "openrouter": {"extra_body": {"reasoning": {"effort": "low"}}},
    "anthropic": {},
    "groq": {},
}
"""The providers, each with fields of its own."""
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": CITY}}]


def completed(episode: Episode, provider: str, messages: list[Any], **more: Any) -> Any:
    base = episode.root if provider == "anthropic" else episode.base_url
    model = f"{provider}/{MODEL}"
    shared: Any = {"messages": messages, "max_tokens": 100, "num_retries": 0, **FIELDS[provider], **more}
    return litellm.completion(model=model, api_base=base, api_key=episode.api_key, **shared)


@pytest.mark.parametrize("provider", FIELDS)
def test_a_reply(provider: str, episode: Episode) -> None:
    reply = completed(episode, provider, [{"role": "user", "content": "hello"}])
    assert reply.choices[0].message.content == HELLO
    assert reply.usage.completion_tokens > 0
    episode.check(turns=1)


@pytest.mark.parametrize("provider", FIELDS)
def test_a_stream(provider: str, episode: Episode) -> None:
    parts = completed(episode, provider, [{"role": "user", "content": "hello"}], stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO
    episode.check(turns=1)


@pytest.mark.parametrize("provider", FIELDS)
def test_a_tool_is_one_trajectory(provider: str, episode: Episode) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    message = completed(episode, provider, messages, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Tokyo"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": SUNNY}]
    final = completed(episode, provider, messages, tools=TOOLS).choices[0].message.content
    assert final == f"The answer is {SUNNY}."
    episode.check(turns=2)
    assert [node["parent"] for node in episode.nodes()] == [-1, 0, 1, 2]


def test_the_responses_api(episode: Episode) -> None:
    reply = litellm.responses(
        model=f"openai/{MODEL}", input="hello", api_base=episode.base_url, api_key=episode.api_key
    )
    assert reply.output_text == HELLO
    episode.check(turns=1)
