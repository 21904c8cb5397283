"""Grammars for real vLLM: a model that samples nonsense samples what it must, and nothing else.

The tiny model is random, so a reply is well-formed only because it is held to it. A bias makes marks and brackets likelier, so
that replies end; those that do not end in time prove nothing and are left out, but some must end. Strings have no bound on their
length here: xgrammar 0.2.8 lets control characters into strings that have one, which is not JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ModelSettings
from gateway.engines.base import Engine, GenerateRequest
from gateway.render.constraints import ContentForm, constraint
from gateway.render.renderer import ChatRenderer, Tool
from gateway.render.segmenter import Piece, Segmenter
from headgate.types import Sampling
from tests.harness.models import save_model
from tests.harness.vllm import SharedEngine

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SEEDS = range(6)
MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
FLAG = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


def tool(name: str, schema: dict[str, Any]) -> Tool:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather", WEATHER), tool("switch", FLAG)]
SCHEMAS = {"weather": WEATHER, "switch": FLAG}
LENIENT = ContentForm("json", WEATHER, "response_format")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("constraints")
    save_model(directory, 0, scale=1.0)
    return directory


@pytest.fixture(scope="module")
async def engine(vllm: SharedEngine, model: Path) -> AsyncIterator[Engine]:
    async with vllm.running(model) as running:
        yield running


@pytest.fixture(scope="module")
def renderer(model: Path) -> ChatRenderer:
    return ChatRenderer.load(ModelSettings(path=model))


async def replies(
    engine: Engine,
    renderer: ChatRenderer,
    *,
    choice: str = "auto",
    parallel: bool = True,
    form: ContentForm | None = None,
    tools: list[Tool] | None = None,
    reasoning: bool = False,
) -> list[list[Piece]]:
    """The complete replies over all seeds; replies that were cut off are left out."""
    tools = TOOLS if tools is None else tools
    prompt = renderer.render(MESSAGES, tools) + (renderer.encode("<think>\n") if reasoning else [])
    grammar = constraint(renderer, tools, choice, parallel, form, reasoning)
    bias = {renderer.encode(mark)[0]: weight for mark, weight in (('"', 4.0), ("}", 5.0), ("</think>", 3.0))}
    base = Sampling(
        max_tokens=600, grammar=grammar, logit_bias=bias, stop_token_ids=sorted(renderer.marks.stop)
    )
    requests = [GenerateRequest(f"r{seed}", prompt, replace(base, seed=seed), 1, "") for seed in SEEDS]
    ended = []
    for ids, finish in await asyncio.gather(*(sampled(engine, request) for request in requests)):
        if finish == "stop":
            segmenter = Segmenter(renderer, reasoning=reasoning, tools=tools)
            ended.append([*segmenter.push(ids), *segmenter.finish()])
    assert ended
    return ended


async def sampled(engine: Engine, request: GenerateRequest) -> tuple[list[int], str | None]:
    ids: list[int] = []
    finish = None
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            ids += chunk.ids
            finish = chunk.finish
    return ids, finish


def text(pieces: list[Piece], kind: str = "content") -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def is_weather(value: Any) -> bool:
    return (
        set(value) == {"city", "unit", "days"}
        and isinstance(value["city"], str)
        and value["unit"] in ("C", "F")
        and 1 <= value["days"] <= 99
    )


def check_calls(pieces: list[Piece], names: set[str]) -> int:
    """Assert that a reply is complete calls with valid arguments and nothing else; returns the number of calls."""
    assert {piece.kind for piece in pieces if piece.kind != "reasoning"} == {"tool_call"}
    calls = [piece.tool_call for piece in pieces if piece.tool_call is not None]
    for call in calls:
        assert call.name in names
        arguments = json.loads(call.arguments)
        assert is_weather(arguments) if call.name == "weather" else set(arguments) == {"on"}
    return len(calls)


async def test_without_a_grammar_it_is_rubbish(engine: Engine, renderer: ChatRenderer) -> None:
    for pieces in await replies(engine, renderer):
        with pytest.raises(json.JSONDecodeError):
            json.loads(text(pieces))


@pytest.mark.parametrize("reasoning", [False, True])
async def test_a_json_object(engine: Engine, renderer: ChatRenderer, reasoning: bool) -> None:
    form = ContentForm("json", {"type": "object"}, "response_format")
    for pieces in await replies(engine, renderer, form=form, tools=[], reasoning=reasoning):
        assert isinstance(json.loads(text(pieces)), dict)


@pytest.mark.parametrize("reasoning", [False, True])
async def test_a_json_schema(engine: Engine, renderer: ChatRenderer, reasoning: bool) -> None:
    thoughts = set()
    for pieces in await replies(engine, renderer, form=LENIENT, tools=[], reasoning=reasoning):
        assert is_weather(json.loads(text(pieces)))
        thoughts.add(text(pieces, "reasoning"))
    assert any(thoughts) is reasoning


@pytest.mark.parametrize("reasoning", [False, True])
async def test_a_named_tool(engine: Engine, renderer: ChatRenderer, reasoning: bool) -> None:
    for pieces in await replies(engine, renderer, choice="function:weather", reasoning=reasoning):
        assert check_calls(pieces, {"weather"}) == 1


async def test_any_of_several_tools_must_be_called(engine: Engine, renderer: ChatRenderer) -> None:
    for pieces in await replies(engine, renderer, choice="required"):
        assert check_calls(pieces, set(SCHEMAS)) >= 1


async def test_one_call_only(engine: Engine, renderer: ChatRenderer) -> None:
    for pieces in await replies(engine, renderer, choice="required", parallel=False, reasoning=True):
        assert check_calls(pieces, set(SCHEMAS)) == 1


async def test_json_or_a_call(engine: Engine, renderer: ChatRenderer) -> None:
    for pieces in await replies(engine, renderer, form=LENIENT):
        if any(piece.tool_call for piece in pieces):
            check_calls(pieces, set(SCHEMAS))
        else:
            assert is_weather(json.loads(text(pieces)))
