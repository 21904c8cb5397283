"""Responses of upstream models: relayed as they are, recorded, and never ended well when they broke off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headgate.processes.ports import free_port
from tests.harness.agents import sdk
from tests.harness.gateways import RunningGateway, serve
from tests.harness.upstream import Elsewhere, behind, call_of, events

WHOLE = {
    "id": "resp_far",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "big-one",
    "output": [],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "extra": {"kept": True},
}
PLACE = {"item_id": "m", "output_index": 0, "content_index": 0}
TEXT = 'it has "type":"response.completed" and\nevent: response.completed'


def event(kind: str, sequence: int, named: bool = True, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": sequence, **fields}, separators=(",", ":"))
    return (f"event: {kind}\n" if named else "").encode() + f"data: {data}\n\n".encode()


def stream_of(last: str = "response.completed", named: bool = True) -> list[bytes]:
    delta = event("response.output_text.delta", 1, named, **PLACE, delta=TEXT, logprobs=[])
    begun = event("response.created", 0, named, response={**WHOLE, "status": "in_progress"})
    more: dict[str, Any] = {"response": WHOLE} if last != "error" else {"message": "no", "code": None}
    return [begun, delta, event(last, 2, named, **more)]


class Responding(Elsewhere):
    """An API that has responses."""

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/responses", self.handle, methods=["POST"])])


@pytest.fixture
async def relayed(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[RunningGateway, Responding]]:
    there, port = Responding(), free_port()
    async with serve(there.app(), port), behind(tiny_model, tmp_path, port) as gateway:
        yield gateway, there


def responding(there: Responding, response: Response) -> None:
    async def respond(_body: dict[str, Any]) -> Response:
        return response

    there.respond = respond


async def test_a_whole_response_is_the_upstreams_own(relayed: tuple[RunningGateway, Responding]) -> None:
    gateway, there = relayed
    responding(there, JSONResponse(WHOLE))
    opened = await gateway.admin.open_episode("task")
    async with sdk(opened) as client:
        respond = await client.responses.create(model="gpt-4o", input="hi", background=True)
        assert respond.to_dict() == WHOLE
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(respond.id)
    ((sent, body),) = there.requests
    assert body == {"model": "big-one", "input": "hi", "background": True}
    assert sent["authorization"] == "Bearer sk-of-the-admin"
    call, exchange = await call_of(gateway, opened.episode_id)
    assert (call["api"], call["finish_reason"]) == ("responses", "upstream")
    assert json.loads(exchange["response"]) == WHOLE


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("last", ["response.completed", "response.incomplete", "response.failed", "error"])
async def test_a_stream_is_the_upstreams_own(
    relayed: tuple[RunningGateway, Responding], last: str, named: bool
) -> None:
    gateway, there = relayed
    responding(there, events(stream_of(last, named)))
    episode, headers = await gateway.open("task")
    body = {"model": "oracle", "input": "hi", "stream": True}
    respond = await gateway.http.post("/v1/responses", json=body, headers=headers)
    assert respond.content == b"".join(stream_of(last, named))
    call, exchange = await call_of(gateway, episode)
    assert (call["finish_reason"], exchange["response"].encode()) == ("upstream", respond.content)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_the_last_event_leaves_after_the_commit(
    relayed: tuple[RunningGateway, Responding], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, there = relayed
    whole, commit = b"".join(stream_of()), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    responding(there, events(pieces()))
    upstream = type(gateway.services.models.upstream["oracle"])
    record = upstream.record

    async def late(self: Any, call: Any) -> None:
        await commit.wait()
        await record(self, call)

    monkeypatch.setattr(upstream, "record", late)
    opened = await gateway.admin.open_episode("task")
    async with sdk(opened) as client:
        stream = await client.responses.create(model="oracle", input="hi", stream=True)
        kinds = [(await anext(stream)).type, (await anext(stream)).type]
        assert kinds == ["response.created", "response.output_text.delta"]
        rest = asyncio.ensure_future(anext(stream))
        assert not (await asyncio.wait({rest}, timeout=0.2))[0]
        commit.set()
        assert (await rest).type == "response.completed"


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
async def test_one_that_broke_off_raises(relayed: tuple[RunningGateway, Responding], end: bytes) -> None:
    """`[DONE]` ends nothing here, and the text of the model does not end it."""
    gateway, there = relayed
    responding(there, events([*stream_of()[:2], end]))
    opened = await gateway.admin.open_episode("task")
    async with sdk(opened) as client:
        stream = await client.responses.create(model="oracle", input="hi", stream=True)
        kinds = []
        with pytest.raises(openai.APIError):  # noqa: PT012
            async for happened in stream:
                kinds.append(happened.type)
            raise AssertionError("it ended well")
        assert kinds == (["response.created", "response.output_text.delta"])
    call, _ = await call_of(gateway, opened.episode_id)
    assert call["finish_reason"] == "error"
