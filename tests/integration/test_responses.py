"""`/v1/responses` as the openai SDK sees it; the engine samples what the test wrote."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.store import responses
from headgate.errors import Unavailable
from tests.harness.agents import client_of, sdk
from tests.harness.records import nodes_of
from tests.harness.responses import Scripted, create, one_path, streamed
from tests.harness.retries import RETRY
from tests.harness.scripted import TOOL_CALL, scripted_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scripted]:
    async with scripted_gateway(tiny_model, tmp_path_factory.mktemp("responses")) as both:
        yield both


@pytest.fixture
def scripted(shared: Scripted) -> Scripted:
    """The module's gateway, with nothing left of the test before."""
    shared[1].replies.clear()
    shared[1].requests.clear()
    return shared


async def test_a_whole_response(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies.append("Hello, wörld 🙂")
    async with client_of(gateway) as (client, episode):
        response = await create(client, "hi", temperature=0.5, metadata={"k": "v"})
        assert response.output_text == "Hello, wörld 🙂"
        assert (response.status, response.model, response.metadata) == ("completed", "gpt-4o", {"k": "v"})
        prompt = len(engine.requests[0]["token_ids"])
        assert response.usage.input_tokens == prompt
        assert response.usage.total_tokens == prompt + response.usage.output_tokens
        (call,) = (await gateway.admin.episode(episode))["calls"]
        assert (call["id"], call["api"], call["finish_reason"]) == (response.id, "responses", "stop")
        raw = await client.responses.with_raw_response.retrieve(response.id)
        assert raw.headers["content-type"] == "application/json"
        assert (await client.responses.retrieve(response.id)) == response


async def test_a_stream_is_the_same_and_its_id_is_valid_immediately(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies.append("Hello, wörld 🙂")
    async with client_of(gateway) as (client, _):
        stream = await client.responses.create(model="m", input="hi", stream=True)
        deltas = []
        async for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.completed":
                kept = await client.responses.retrieve(event.response.id)
                assert kept == event.response
        assert "".join(deltas) == kept.output_text == "Hello, wörld 🙂"
        assert len(deltas) > 5, "text is streamed as it comes"


def output(call: Any) -> Any:
    return {"type": "function_call_output", "call_id": call.call_id, "output": "3"}


REPLIES = [f"Let me see.{TOOL_CALL}", TOOL_CALL, "It is 3.", "Bye."]
THOUGHTS = ["<think>\nI add.\n</think>\n\n", "<think>\nAgain.\n</think>\n\n", "<think>\nSo.\n</think>\n\n"]
"""This template keeps them until the next message of a user."""


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_part_of_the_path(scripted: Scripted, stream: bool) -> None:
    gateway, engine = scripted
    engine.replies += [thought + reply for thought, reply in zip(THOUGHTS, REPLIES, strict=False)]
    async with client_of(gateway) as (client, episode):
        previous, given = None, "1 + 2?"
        for _ in range(3):
            body: dict[str, Any] = {"tools": [ADD], "previous_response_id": previous}
            if stream:
                response = (await streamed(client, given, **body))[-1].response
            else:
                response = await create(client, given, **body)
            previous, given = (
                response.id,
                [output(item) for item in response.output if "call_id" in item.to_dict()],
            )
        assert response.output_text == "It is 3."
        await one_path(gateway, episode, turns=3)


async def test_a_chain_of_responses_is_one_token_path(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += REPLIES
    given: dict[str, Any] = {"instructions": "Use tools.", "tools": [ADD]}
    async with client_of(gateway) as (client, episode):
        response = await create(client, "1 + 2?", **given)
        for _ in range(2):
            call = response.output[-1]
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
            response = await create(client, [output(call)], previous_response_id=response.id, **given)
        assert response.output_text == "It is 3."
        *_, last = await streamed(client, "thanks", previous_response_id=response.id, **given)
        assert last.response.output_text == "Bye."
        assert last.response.previous_response_id == response.id
        await one_path(gateway, episode, turns=4)
        text = gateway.model.renderer.decode(engine.requests[-1]["token_ids"])
        assert text.count("Use tools.") == 1
        assert text.count("1 + 2?") == 1


@pytest.mark.parametrize("ids", [True, False])
async def test_a_client_that_keeps_its_own_history_is_one_token_path(scripted: Scripted, ids: bool) -> None:
    gateway, engine = scripted
    engine.replies += REPLIES
    history: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    async with client_of(gateway) as (client, episode):
        for stream in (False, True, False, True):
            body = {"tools": [ADD], "store": False}
            if stream:
                response = (await streamed(client, history, **body))[-1].response
            else:
                response = await create(client, history, **body)
            for item in response.output:
                kept = item.model_dump(exclude_none=True)
                if not ids:
                    kept.pop("id")
                history.append(kept)
            last = response.output[-1]
            history.append(
                output(last) if last.type == "function_call" else {"role": "user", "content": "so?"}
            )
        assert response.output_text == "Bye."
        await one_path(gateway, episode, turns=4)


async def test_an_item_can_be_referred_to(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += [TOOL_CALL, "It is 3."]
    async with client_of(gateway) as (client, episode):
        first = await create(client, "1 + 2?", tools=[ADD])
        given = (await client.responses.input_items.list(first.id)).data
        references: Any = [{"type": "item_reference", "id": item.id} for item in (*given, *first.output)]
        second = await create(client, [*references, output(first.output[-1])], tools=[ADD])
        assert second.output_text == "It is 3."
        await one_path(gateway, episode, turns=2)
        for item_id in ("msg_00_0", "nonsense"):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await create(client, [{"type": "item_reference", "id": item_id}])


async def test_instructions_are_not_carried_over(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["a", "b"]
    async with client_of(gateway) as (client, _):
        first = await create(client, "hi", instructions="Be a pirate.")
        await create(client, "ho", previous_response_id=first.id, instructions="Be brief.")
        text = gateway.model.renderer.decode(engine.requests[-1]["token_ids"])
        assert "pirate" not in text
        assert "Be brief." in text


async def test_responses_branch_where_clients_go_on_from_the_same_one(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["root", "left", "right", "more"]
    async with client_of(gateway) as (client, _):
        root = await create(client, "hi")
        await create(client, "l?", previous_response_id=root.id)
        right = await create(client, "r?", previous_response_id=root.id)
        await create(client, "m?", previous_response_id=right.id)
        text = gateway.model.renderer.decode(engine.requests[-1]["token_ids"])
        assert [text.find(reply) > 0 for reply in ("root", "left", "right", "m?")] == [
            True,
            False,
            True,
            True,
        ]
        assert text.index("root") < text.index("r?") < text.index("right") < text.index("m?")


async def test_a_deleted_response_is_gone_and_what_continues_it_is_not(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["one", "two", "three"]
    async with client_of(gateway) as (client, episode):
        first = await create(client, "hi")
        second = await create(client, "ho", previous_response_id=first.id)
        raw = await gateway.http.delete(
            f"/v1/responses/{first.id}", headers={"Authorization": f"Bearer {client.api_key}"}
        )
        assert raw.json() == {"id": first.id, "object": "response", "deleted": True}
        for work in (
            client.responses.retrieve(first.id),
            client.responses.delete(first.id),
            client.responses.input_items.list(first.id),
            client.responses.cancel(first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        with pytest.raises(openai.NotFoundError) as error:
            await create(client, "x", previous_response_id=first.id)
        assert (error.value.code, error.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )
        third = await create(client, "hu", previous_response_id=second.id)
        assert third.output_text == "three"
        await one_path(gateway, episode, turns=3)
        await client.responses.delete(second.id)


async def test_a_response_that_is_not_stored_cannot_be_come_back_for(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["one", "two"]
    async with client_of(gateway) as (client, _):
        whole = await create(client, "hi", store=False)
        stream = (await streamed(client, "ho", store=False))[-1].response
        for response in (whole, stream):
            assert response.store is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await create(client, "x", previous_response_id=response.id)


async def test_another_episodes_responses_do_not_exist(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["mine"]
    async with client_of(gateway) as (mine, _), client_of(gateway) as (other, episode):
        response = await create(mine, "hi")
        for work in (
            other.responses.retrieve(response.id),
            other.responses.delete(response.id),
            other.responses.input_items.list(response.id),
            create(other, "x", previous_response_id=response.id),
            create(other, [{"type": "item_reference", "id": response.output[0].id}]),
        ):
            with pytest.raises(openai.NotFoundError):
                await work
        assert await nodes_of(gateway, episode) == []
        assert (await mine.responses.retrieve(response.id)).output_text == "mine"


async def test_input_items_are_listed_page_by_page(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["x"]
    given: Any = [{"role": "user", "content": str(i)} for i in range(5)]
    async with client_of(gateway) as (client, _):
        response = await create(client, given)
        for order in ("asc", "desc"):
            items = [i async for i in client.responses.input_items.list(response.id, order=order, limit=2)]  # type: ignore[arg-type]
            texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
            assert texts == [str(i) for i in (range(5) if order == "asc" else range(4, -1, -1))]
        page = await client.responses.input_items.list(response.id, limit=2, after=items[2].id)
        assert (page.has_more, len(page.data)) == (False, 2)
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(response.id, after="msg_unknown")


async def test_what_is_refused_of_a_stored_response(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["x"]
    async with client_of(gateway) as (client, _):
        response = await create(client, "hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(response.id)
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.retrieve(response.id, stream=True)
        assert error.value.param == "stream"


async def test_input_tokens_are_those_of_the_prompt(scripted: Scripted) -> None:
    gateway, engine = scripted
    engine.replies += ["x", "y"]
    given: dict[str, Any] = {"model": "m", "instructions": "Short.", "tools": [ADD]}
    async with client_of(gateway) as (client, _):
        counted = await client.responses.input_tokens.count(input="hi", **given)
        first = await create(client, "hi", **given)
        assert counted.input_tokens == first.usage.input_tokens
        given["previous_response_id"] = first.id
        counted = await client.responses.input_tokens.count(input="ho", **given)
        second = await create(client, "ho", **given)
        assert counted.input_tokens == second.usage.input_tokens
        assert (await client.responses.input_tokens.count(input="hi")).input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_same_response(scripted: Scripted, stream: bool) -> None:
    gateway, engine = scripted
    engine.replies += [f"<think>\nhm\n</think>\n\nso{TOOL_CALL}"]
    body: dict[str, Any] = {"tools": [ADD], "extra_headers": RETRY}
    async with client_of(gateway) as (client, episode):
        if stream:
            responses = [(await streamed(client, "hi", **body))[-1].response for _ in range(2)]
        else:
            responses = [await create(client, "hi", **body) for _ in range(2)]
        assert responses[0] == responses[1]
        assert len(engine.requests) == 1
        assert await client.responses.retrieve(responses[0].id) == responses[0]
        await one_path(gateway, episode, turns=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_cannot_be_stored_is_not_called_complete(
    scripted: Scripted, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, engine = scripted
    engine.replies.append("yes")

    def full(*_: Any) -> None:
        raise Unavailable("the disk is full", retry_after=1.0)

    insert = responses.insert_response
    monkeypatch.setattr(responses, "insert_response", full)
    async with client_of(gateway) as (client, _):
        with pytest.raises(openai.APIError, match="disk"):
            await (streamed(client, "hi") if stream else create(client, "hi"))
        monkeypatch.setattr(responses, "insert_response", insert)
        send = streamed if stream else create
        again = await send(client, "hi", extra_headers=RETRY)
        response = again[-1].response if stream else again
        assert await client.responses.retrieve(response.id) == response
        assert len(engine.requests) == 1


async def test_a_retry_reports_the_used_settings_too(tiny_model: Path, tmp_path: Path) -> None:
    """A training episode is sampled with the configured settings, which both processes report."""
    fixed = {"sampling": {"temperature": {"min": 0.75}, "top_p": {"max": 0.5}}}
    body: dict[str, Any] = {"temperature": 0.0, "reasoning": {"effort": "high"}, "truncation": "auto"}
    async with scripted_gateway(tiny_model, tmp_path, **fixed) as (gateway, engine):
        engine.replies.append("yes")
        opened = await gateway.admin.open_episode("task")
        async with sdk(opened) as client:
            first = await create(client, "hi", **body)
        recorded = await gateway.admin.episode(opened.episode_id)
    assert (first.temperature, first.top_p, first.truncation) == (0.75, 0.5, "auto")
    assert first.created_at <= first.completed_at <= first.created_at + 60
    assert body.items() <= recorded["calls"][0]["requested"].items()
    async with scripted_gateway(tiny_model, tmp_path, **fixed) as (gateway, engine):
        again = sdk(replace(opened, base_url=f"{gateway.url}/v1"))
        assert await create(again, "hi", **body, extra_headers=RETRY) == first
        assert engine.requests == []
        await again.close()


async def test_a_conversation_goes_on_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies += ["one", "two"]
        opened = await gateway.admin.open_episode("task")
        async with sdk(opened) as client:
            first = await create(client, "hi")
            second = (await streamed(client, "ho", previous_response_id=first.id))[-1].response
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies += ["three"]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=opened.api_key) as client:
            assert await client.responses.retrieve(second.id) == second
            third = await create(client, "hu", previous_response_id=second.id)
            assert third.output_text == "three"
        await one_path(gateway, opened.episode_id, turns=3)
