"""Calls of the Responses API through the openai SDK."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.harness.gateways import RunningGateway
from tests.harness.open_responses import check_event, check_response
from tests.harness.records import nodes_of, path_to
from tests.harness.scripted import ScriptedEngine

Scripted = tuple[RunningGateway, ScriptedEngine]


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(response: Any) -> Any:
    """Return a response that fits the SDK's types; the SDK itself does not check."""
    dumped = response.model_dump(mode="json", by_alias=True, exclude_unset=True)
    Response.model_validate(dumped)
    check_response(dumped)
    return response


async def create(client: openai.AsyncOpenAI, text: Any, **body: Any) -> Any:
    return checked(await client.responses.create(**{"model": "gpt-4o", "input": text, **body}))


async def streamed(client: openai.AsyncOpenAI, text: Any, **body: Any) -> list[Any]:
    stream = await client.responses.create(**{"model": "gpt-4o", "input": text, "stream": True, **body})
    events = [event async for event in stream]
    for event in events:
        dumped = event.model_dump(mode="json", by_alias=True, exclude_unset=True)
        EVENT.validate_python(dumped)
        check_event(dumped)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def one_path(gateway: RunningGateway, episode: str, turns: int) -> None:
    """Every turn goes on from the tokens of the one before it."""
    nodes = await nodes_of(gateway, episode)
    sampled = [node for node in nodes if node["sampled"]]
    assert len(sampled) == turns
    before: list[int] = []
    for node in sampled:
        path = path_to(nodes, node)
        assert path[: len(before)] == before
        before = path + node["ids"]
    assert [node["parent"] for node in nodes] == list(range(-1, len(nodes) - 1)), "no branches"
