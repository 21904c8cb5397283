"""Chat completions that clients come back for (`store`), as the openai SDK sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from gateway.errors import Unavailable
from gateway.store import answers
from tests.harness.agents import client_of, sdk
from tests.harness.gateways import RunningGateway
from tests.harness.scripted import TOOL_CALL, TOOLS, USER, ScriptedEngine, scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

Scripted = tuple[RunningGateway, ScriptedEngine]


@pytest.fixture(scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    async with scripted_gateway(tiny_model, tmp_path_factory.mktemp("stored")) as both:
        yield both


@pytest.fixture
def scripted(shared: Scripted) -> Scripted:
    """The module's gateway, with nothing left of the test before."""
    shared[1].replies.clear()
    shared[1].requests.clear()
    return shared


async def ask(client: openai.AsyncOpenAI, text: str, **body: Any) -> ChatCompletion:
    given: dict[str, Any] = {
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": text}],
        "store": True,
    }
    answer: ChatCompletion = await client.chat.completions.create(**{**given, **body})
    return answer


async def stream(client: openai.AsyncOpenAI, **body: Any) -> list[Any]:
    given: dict[str, Any] = {"model": "gpt-4o", "messages": [USER], "store": True, "stream": True}
    return [chunk async for chunk in await client.chat.completions.create(**{**given, **body})]


def plain(completion: ChatCompletion) -> dict[str, Any]:
    """Without what only stored ones have."""
    shown = completion.model_dump(exclude_unset=True)
    shown.pop("metadata", None)
    return shown


async def test_a_stored_completion_is_what_its_client_got(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["<think>\nhm\n</think>\n\nyes", f"no{TOOL_CALL}"]
    async with client_of(gateway, mode="eval") as (client, _):
        answer = await ask(client, "hi", metadata={"k": "v"}, tools=TOOLS, n=2)
        stored = await client.chat.completions.retrieve(answer.id)
        assert plain(stored) == plain(answer)
        assert len(stored.choices) == 2
        assert stored.metadata == {"k": "v"}  # type: ignore[attr-defined]


async def test_a_stream_is_stored_before_its_end(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += [f"<think>\nhm\n</think>\n\nyes{TOOL_CALL}"]
    async with client_of(gateway) as (client, _):
        body: dict[str, Any] = {
            "model": "m",
            "messages": [USER],
            "store": True,
            "stream": True,
            "tools": TOOLS,
        }
        async for chunk in await client.chat.completions.create(**body):
            if chunk.choices[0].finish_reason:
                stored = await client.chat.completions.retrieve(chunk.id)
        assert stored.choices[0].finish_reason == "tool_calls"
        message = stored.choices[0].message
        assert (message.content, message.reasoning_content) == ("yes", "hm")  # type: ignore[attr-defined]
        assert message.tool_calls is not None
        assert stored.usage is not None


@pytest.mark.parametrize("store", [None, False])
async def test_only_what_asks_for_it_is_stored(scripted: Scripted, store: bool | None) -> None:
    gateway, engine = scripted
    engine.replies += ["a", "b"]
    async with client_of(gateway) as (client, _):
        answer = await ask(client, "hi", store=store)
        chunks = await stream(client, store=store)
        for completion_id in (answer.id, chunks[0].id):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.retrieve(completion_id)
        assert (await client.chat.completions.list()).data == []


async def test_they_are_listed_page_by_page(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += list("abcde")
    async with client_of(gateway) as (client, _):
        made = [
            await ask(client, text, model=model, metadata={"even": str(i % 2 == 0), "i": str(i)})
            for i, (text, model) in enumerate(zip("12345", ("m", "n", "m", "n", "m"), strict=True))
        ]
        ids = [answer.id for answer in made]
        completions = client.chat.completions
        assert [c.id async for c in completions.list(limit=2)] == ids
        assert [c.id async for c in completions.list(limit=2, order="desc")] == ids[::-1]
        assert [c.id async for c in completions.list(model="n", limit=1)] == [ids[1], ids[3]]
        assert [c.id async for c in completions.list(metadata={"even": "True"}, limit=2)] == ids[::2]
        assert [c.id async for c in completions.list(metadata={"even": "True", "i": "2"})] == [ids[2]]
        page = await completions.list(after=ids[1], limit=2)
        assert ([c.id for c in page.data], page.has_more) == (ids[2:4], True)
        with pytest.raises(openai.NotFoundError):
            await completions.list(after="chatcmpl-nobody")
        with pytest.raises(openai.BadRequestError):
            await completions.list(limit=0)


async def test_metadata_is_replaced(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["a"]
    async with client_of(gateway) as (client, _):
        answer = await ask(client, "hi", metadata={"k": "v"})
        updated = await client.chat.completions.update(answer.id, metadata={"l": "w"})
        again = await client.chat.completions.retrieve(answer.id)
        assert again == updated
        assert again.metadata == {"l": "w"}  # type: ignore[attr-defined]
        assert plain(again) == plain(answer)
        for wrong in (3, {"k": 3}):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.update(answer.id, metadata=wrong)  # type: ignore[arg-type]


async def test_a_deleted_one_is_gone(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["a", "b"]
    async with client_of(gateway) as (client, _):
        answer, other = await ask(client, "1"), await ask(client, "2")
        deleted = await client.chat.completions.delete(answer.id)
        assert deleted.to_dict() == {"object": "chat.completion.deleted", "id": answer.id, "deleted": True}
        completions = client.chat.completions
        for work in (
            completions.retrieve(answer.id),
            completions.delete(answer.id),
            completions.update(answer.id, metadata={}),
            completions.messages.list(answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        assert [c.id async for c in completions.list()] == [other.id]


async def test_its_messages(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["a"]
    parts = [{"type": "text", "text": "in"}, {"type": "text", "text": " parts"}]
    given: list[Any] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "x"},
        USER,
    ]
    async with client_of(gateway) as (client, _):
        answer = await ask(client, "", messages=given)
        listed = [m async for m in client.chat.completions.messages.list(answer.id, limit=3)]
        shown = [(m.role, m.content, m.to_dict()["content_parts"]) for m in listed]
        assert shown == [
            ("system", "s", None),
            ("user", None, parts),
            ("assistant", "x", None),
            ("user", "hi", None),
        ]
        assert len({m.id for m in listed}) == 4
        last = await client.chat.completions.messages.list(answer.id, order="desc", limit=1)
        assert (last.data[0].id, last.has_more) == (listed[-1].id, True)


async def test_another_episodes_completions_do_not_exist(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["a"]
    async with client_of(gateway) as (mine, _), client_of(gateway) as (other, _):
        answer = await ask(mine, "hi")
        completions = other.chat.completions
        for work in (
            completions.retrieve(answer.id),
            completions.delete(answer.id),
            completions.update(answer.id, metadata={}),
            completions.messages.list(answer.id),
            completions.list(after=answer.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        assert (await completions.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(answer.id)
        assert (await mine.chat.completions.retrieve(answer.id)).id == answer.id


async def test_one_that_cannot_be_stored_does_not_end_well(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = scripted
    engine.replies += ["a", "b"]

    def full(*_: Any) -> None:
        raise Unavailable("the disk is full", retry_after=1.0)

    monkeypatch.setattr(answers, "insert_answer", full)
    async with client_of(gateway) as (client, _):
        with pytest.raises(openai.APIError, match="disk"):
            await ask(client, "hi")
        with pytest.raises(openai.APIError, match="disk"):
            await stream(client)


async def test_a_broken_stream_is_not_stored(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies.append("half of it")
    says = engine.generate

    async def half(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for chunk in says(body):
            yield chunk
            if chunk["token_ids"] == engine.encode("f"):
                await asyncio.Event().wait()

    engine.generate = half  # type: ignore[method-assign]
    try:
        async with client_of(gateway) as (client, episode):
            body: dict[str, Any] = {"model": "m", "messages": [USER], "store": True, "stream": True}
            with pytest.raises(openai.APIError, match="episode"):  # noqa: PT012
                async for chunk in await client.chat.completions.create(**body):
                    if chunk.choices[0].delta.content == "f":
                        await gateway.admin.abandon(episode, "enough")
    finally:
        del engine.generate
    row = await gateway.services.database.read(lambda c: answers.answer(c, chunk.id, "chat"))
    assert row is None


async def test_they_survive_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies += ["one"]
        opened = await gateway.admin.open_episode("task")
        async with sdk(opened) as client:
            answer = await ask(client, "hi")
    async with (
        scripted_gateway(tiny_model, tmp_path) as (gateway, _),
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=opened.api_key) as client,
    ):
        assert plain(await client.chat.completions.retrieve(answer.id)) == plain(answer)
