"""Equal requests in one episode, some of which are refused, fail or lose their client: each gets a reply of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headgate.errors import Unavailable
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.clusters import run_cluster
from tests.harness.expiry import patient_bus
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.retries import RETRY, drop, lasting, send, stops, turns_of
from tests.harness.servers import PostgresServer, RedisServer, redis_server
from tests.harness.waiting import LONG_S, until

AGENT_KEY = "an-agents-key-0123456789"


@pytest.fixture
async def narrow(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A caller with one running call is refused a second one."""
    limits = {"episode": {"calls": 1}, "agent": {"calls": 1}}
    agents = {"ann": {"key": AGENT_KEY}}
    async with run_gateway(settings_for(tiny_model, tmp_path, limits=limits, agents=agents)) as running:
        yield running


async def turns_and_ids(
    gateway: RunningGateway, episode: str, *responses: httpx.Response
) -> tuple[set[str], set[str]]:
    """The recorded turns that are trained, and the replies that clients got: the ids of both."""
    turns = {turn["call_id"] for turn in await turns_of(gateway, episode) if not turn["mask_reason"]}
    return turns, {response.json()["id"] for response in responses}


async def check_own_replies(gateway: RunningGateway, episode: str, *responses: httpx.Response) -> None:
    """Every client has a reply of its own, and nothing else is trained."""
    assert [response.status_code for response in responses] == [200] * len(responses)
    turns, ids = await turns_and_ids(gateway, episode, *responses)
    assert turns == ids and len(ids) == len(responses)


async def test_what_the_sdk_sends_again_after_a_429_is_not_its_siblings_reply(narrow: RunningGateway) -> None:
    await hold_after(narrow, 1)
    opened = await narrow.admin.open_episode("task")
    body = lasting(narrow)
    refused: list[httpx.Request] = []

    async def note(response: httpx.Response) -> None:
        if response.status_code == 429 and response.request.headers["x-stainless-retry-count"] == "0":
            refused.append(response.request)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    url, key = f"{narrow.url}/v1", opened.api_key
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, max_retries=20, timeout=LONG_S, http_client=http
    ) as client:
        asking = asyncio.gather(*(client.chat.completions.create(**body) for _ in range(3)))
        await until(lambda: len(refused) == 2, "two of the three are refused while the other one runs")
        await release(narrow)
        responses = await asking
    assert len({response.id for response in responses}) == 3
    assert len(await turns_of(narrow, opened.episode_id)) == 3


async def test_a_retry_of_a_refused_call_begins_while_its_sibling_runs(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is refused with 503 before its prompt is made."""
    await hold_after(gateway, 5)
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    first = asyncio.create_task(send(gateway, headers, body), name="first")
    await arrived(gateway, 1)

    async def refuse(*_: Any) -> Any:
        raise Unavailable("not now", retry_after=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(gateway.model.recorder, "prepare", refuse)
        assert (await send(gateway, headers, body)).status_code == 503
        assert (await send(gateway, headers, body, **RETRY)).status_code == 503
    again = asyncio.create_task(send(gateway, headers, body, **RETRY), name="again")
    await arrived(gateway, 2)
    await release(gateway)
    await check_own_replies(gateway, episode, await first, await again)


async def test_a_retry_of_a_call_that_failed_begins_while_its_sibling_runs(gateway: RunningGateway) -> None:
    """The call had begun, and its engine was lost."""
    await hold_after(gateway, 0)
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    first, second = [asyncio.create_task(send(gateway, headers, body)) for _ in range(2)]
    (live,) = gateway.services.episodes._live.values()
    await arrived(gateway, 2)
    failing = sorted(live.calls, key=lambda call: call.details.received_at)[1]
    await failing.stop(Unavailable("its engine is gone", retry_after=1.0, code="no_engine"))
    await until(lambda: len(live.calls) == 1, "one has failed")
    responded = {call.reply.call_id for call in live.calls}
    await release(gateway)
    again = await send(gateway, headers, body, **RETRY)
    responses = await asyncio.gather(first, second)
    (other,) = [response for response in responses if response.status_code == 200]
    assert {other.json()["id"]} == responded
    await check_own_replies(gateway, episode, other, again)


async def test_a_retry_of_which_nothing_is_known_takes_no_reply_of_several(gateway: RunningGateway) -> None:
    """For example, a proxy refused it."""
    await hold_after(gateway, 1)
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    served = [asyncio.create_task(send(gateway, headers, body)) for _ in range(2)]
    await arrived(gateway, 2)
    retry = asyncio.create_task(send(gateway, headers, body, **RETRY), name="retry")
    await arrived(gateway, 3)
    await release(gateway)
    running = await retry
    recorded = await send(gateway, headers, body, **RETRY)
    await check_own_replies(gateway, episode, *await asyncio.gather(*served), running, recorded)


async def test_a_reply_that_lost_its_client_is_taken_once(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open("task")
    body = lasting(gateway)
    await drop(gateway, headers, body, 20)
    (live,) = gateway.services.episodes._live.values()
    (lost,) = live.calls
    responses = await asyncio.gather(*(send(gateway, headers, body, **RETRY) for _ in range(2)))
    assert lost.reply.call_id in {response.json()["id"] for response in responses}
    # the first of them joins; then no process knows of a second client, and it may have lost its connection unnoticed
    assert len({response.json()["id"] for response in responses}) == 1
    await hold_after(gateway, 5)
    served = asyncio.create_task(send(gateway, headers, body))
    await arrived(gateway, 1)
    await drop_next_to_another(gateway, headers, body)
    again = await asyncio.gather(*(send(gateway, headers, body, **RETRY) for _ in range(2)))
    await check_own_replies(gateway, episode, responses[0], await served, *again)


async def drop_next_to_another(
    gateway: RunningGateway, headers: dict[str, str], body: dict[str, Any]
) -> None:
    """Send a request while another one waits at the barrier, and break its connection."""
    call = asyncio.create_task(send(gateway, headers, body), name="dropped")
    await arrived(gateway, 2)
    call.cancel()
    await until(lambda: gateway.engine.running == 1, "its engine stops")
    await release(gateway)


async def test_once_a_refused_call_has_come_again_a_lost_connection_gets_its_reply(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused call counts once."""
    episode, headers = await gateway.open("task")
    body = lasting(gateway)

    async def refuse(*_: Any) -> Any:
        raise Unavailable("not now", retry_after=1.0)

    with monkeypatch.context() as patched:
        patched.setattr(gateway.model.recorder, "prepare", refuse)
        assert (await send(gateway, headers, body)).status_code == 503
    begun = await send(gateway, headers, body, **RETRY)
    unnoticed = await send(gateway, headers, body, **{"x-stainless-retry-count": "2"})
    assert unnoticed.json()["id"] == begun.json()["id"]
    await check_own_replies(gateway, episode, begun)


async def test_an_agents_call_that_was_refused_is_given_no_other_ones_episode(narrow: RunningGateway) -> None:
    await hold_after(narrow, 1)
    headers, body = {"Authorization": f"Bearer {AGENT_KEY}"}, lasting(narrow)
    first = asyncio.create_task(send(narrow, headers, body), name="first")
    await arrived(narrow, 1)
    assert (await send(narrow, headers, body)).status_code == 429
    await release(narrow)
    response = await first
    again = await send(narrow, headers, body, **RETRY)
    assert again.headers["x-headgate-episode"] != response.headers["x-headgate-episode"]
    assert again.json()["id"] != response.json()["id"]
    await stops(narrow)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_what_one_process_refused_another_one_begins(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    bus = patient_bus(redis, log_s=3600.0)  # no log is forgotten by itself
    store, limits = postgres.url(postgres.new_database()), {"episode": {"calls": 1}}
    async with run_cluster(store, tiny_model, tmp_path, bus=bus, limits=limits) as cluster:
        one, other = cluster.members
        async with cluster.admin() as admin:
            opened = await admin.open_episode("t")
            engine = cluster.engines[0]
            engine.hold_after(0)
            first = asyncio.create_task(one.chat(opened.api_key), name="first")
            await engine.arrived(1)
            assert (await one.chat(opened.api_key)).status_code == 429
            place = next(iter(one.services.replies._refused._arrived))
            await known(other.services.replies._handover, place, 2)
            async with other.client(opened.api_key) as http:
                again = asyncio.create_task(ask(http, **RETRY), name="again")
                await until(lambda: engine.held == 2 or again.done(), "it generates, too")
                engine.release()
                responses = [await again, await first]
            assert [response.status_code for response in responses] == [200, 200]
            ids = {response.json()["id"] for response in responses}
            turns = [n for n in (await admin.trajectory(opened.episode_id))["nodes"] if n["sampled"]]
            assert len(ids) == 2 and {turn["call_id"] for turn in turns} == ids
            assert [turn["mask_reason"] for turn in turns] == ["", ""]
            await known(one.services.replies._handover, place, 0)


async def test_once_another_process_has_served_a_refused_request_a_lost_connection_gets_its_reply(
    postgres: PostgresServer,
    redis: RedisServer,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that refused it does not begin a second reply."""
    bus = patient_bus(redis, log_s=3600.0)  # no log is forgotten by itself
    store = postgres.url(postgres.new_database())
    async with run_cluster(store, tiny_model, tmp_path, bus=bus) as cluster:
        one, other = cluster.members
        async with cluster.admin() as admin:
            opened = await admin.open_episode("t")

            async def refuse(*_: Any) -> Any:
                raise Unavailable("not now", retry_after=1.0)

            (model,) = one.services.models
            with monkeypatch.context() as patched:
                patched.setattr(model.recorder, "prepare", refuse)
                assert (await one.chat(opened.api_key)).status_code == 503
            place = next(iter(one.services.replies._refused._arrived))
            await known(other.services.replies._handover, place, 1)
            async with other.client(opened.api_key) as http:
                begun = await ask(http, **RETRY)
            await known(one.services.replies._handover, place, 0)
            async with one.client(opened.api_key) as http:
                unnoticed = await ask(http, **RETRY)
            assert unnoticed.json()["id"] == begun.json()["id"]
            turns = [n for n in (await admin.trajectory(opened.episode_id))["nodes"] if n["sampled"]]
            assert [turn["call_id"] for turn in turns] == [begun.json()["id"]]


async def known(handover: Any, place: tuple[str, str], count: int) -> None:
    """Wait until a process knows exactly `count` requests that run or are expected back."""

    async def as_many() -> bool:
        return len(await handover.find(place)) == count

    await until(as_many, f"{count} requests are known")


async def ask(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    return await http.post("/v1/chat/completions", json=body, headers=headers)
