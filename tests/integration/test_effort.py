"""Reasoning effort in every dialect: the prompt, the record, and where a conversation branches."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.families.family import TEMPLATES
from tests.harness.records import nodes_of, path_to
from tests.harness.responses import Scripted
from tests.harness.scripted import scripted_gateway
from tests.harness.templates import EFFORT_TEMPLATE

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: dict[str, Any] = {"role": "user", "content": "hi"}
NOT_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@asynccontextmanager
async def gateway_with(template: str, tiny_model: Path, work: Path) -> AsyncIterator[Scripted]:
    model = shutil.copytree(tiny_model, work / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(model))
    models = {"demo": {"path": str(model), "family": "template"}}
    async with scripted_gateway(model, work, models=models) as both:
        yield both


@pytest.fixture(scope="module")
async def scripted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    """A model whose template knows `enable_thinking`, and no effort."""
    template = (TEMPLATES / "qwen3.jinja").read_text()
    async with gateway_with(template, tiny_model, tmp_path_factory.mktemp("effort")) as both:
        yield both


async def ask(scripted: Scripted, headers: dict[str, str], path: str, **body: Any) -> Any:
    response = await scripted[0].http.post(path, json={"model": "m", **body}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("path", "body", "thinks"),
    [
        ("/v1/chat/completions", {"messages": [HI], "reasoning_effort": "none"}, False),
        ("/v1/chat/completions", {"messages": [HI], "reasoning_effort": "high", "verbosity": "low"}, True),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "minimal"}}, False),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "xhigh"}, "service_tier": "fast"}, True),
        ("/v1/messages", {"messages": [HI], "max_tokens": 9, "thinking": {"type": "disabled"}}, False),
        ("/v1/messages", {"messages": [HI], "max_tokens": 9, "output_config": {"effort": "max"}}, True),
    ],
)
async def test_what_becomes_of_it(scripted: Scripted, path: str, body: dict[str, Any], thinks: bool) -> None:
    gateway, engine = scripted
    engine.replies.append("yes")
    episode, headers = await gateway.open()
    await ask(scripted, headers, path, **body)
    prompt = gateway.model.renderer.decode(engine.requests[-1]["token_ids"])
    assert prompt.endswith(NOT_THINKING) is not thinks
    (call,) = (await gateway.admin.episode(episode))["calls"]
    parameters = {name: value for name, value in body.items() if name not in ("messages", "input")}
    assert parameters.items() <= call["requested"].items(), "what was requested"
    assert call["used"].get("switches") == (None if thinks else {"enable_thinking": False}), "what was used"


async def test_tokens_are_counted_as_they_would_be_given(scripted: Scripted) -> None:
    _, headers = await scripted[0].open()
    counts = [
        (await ask(scripted, headers, path, **body))[name]
        for path, body, name in (
            ("/v1/responses/input_tokens", {"input": "hi"}, "input_tokens"),
            ("/v1/responses/input_tokens", {"input": "hi", "reasoning": {"effort": "none"}}, "input_tokens"),
            (
                "/v1/messages/count_tokens",
                {"messages": [HI], "thinking": {"type": "disabled"}},
                "input_tokens",
            ),
        )
    ]
    encode = scripted[0].model.renderer.encode
    more = len(encode(NOT_THINKING)) - len(encode("<|im_start|>assistant\n"))
    assert counts == [counts[0], counts[0] + more, counts[0] + more]


async def talk_of(scripted: Scripted, *efforts: str, forget_before: str = "") -> list[str]:
    """A turn with each effort, and what the record has of each: from the root to the end of the reply."""
    gateway, engine = scripted
    engine.replies += [f"reply {i}" for i in range(len(efforts))]
    episode, headers = await gateway.open()
    talk: list[dict[str, Any]] = [HI]
    for effort in efforts:
        if effort == forget_before:
            gateway.model.recorder.forget(episode)
        response = await ask(
            scripted, headers, "/v1/chat/completions", messages=talk, reasoning_effort=effort
        )
        talk += [response["choices"][0]["message"], HI]
    nodes = await nodes_of(gateway, episode)
    decode = gateway.model.renderer.decode
    return [decode(path_to(nodes, node) + node["ids"]) for node in nodes if node["sampled"]]


async def test_only_what_changes_the_prompt_makes_a_branch(scripted: Scripted) -> None:
    first, second, third, fourth = await talk_of(scripted, "low", "high", "none", "medium")
    assert second.startswith(first), "low and high are the same to this template"
    assert third.startswith(second)
    assert third.endswith(f"{NOT_THINKING}reply 2<|im_end|>")
    assert not fourth.startswith(third), "without the empty thought, as the template has it now"
    assert "think" not in fourth


@pytest.mark.parametrize("forget_before", ["", "high"])
async def test_a_prompt_is_the_templates_own_after_a_change(
    tiny_model: Path, tmp_path: Path, forget_before: str
) -> None:
    """The template writes the effort at the beginning; the conversation may also come from the store."""
    async with gateway_with(EFFORT_TEMPLATE, tiny_model, tmp_path) as scripted:
        first, second, third, fourth = await talk_of(
            scripted, "low", "low", "high", "max", forget_before=forget_before
        )
    assert second.startswith(first)
    for text, effort, replies in ((first, "low", 1), (third, "high", 3), (fourth, "medium", 4)):
        assert text.startswith(f"<|im_start|>system\nReasoning: {effort}<|im_end|>")
        assert [f"reply {i}" in text for i in range(4)] == [i < replies for i in range(4)]
