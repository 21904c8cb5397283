"""A request for several replies is as many calls, for the limits of its key and for the queue that all share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.dialects.request import replies_of
from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.upstream import Elsewhere, behind
from tests.harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    values = settings_for(
        tiny_model,
        tmp_path_factory.mktemp("replies"),
        limits={"episode": {"calls": 8}},
        queue={"max_waiting": 6},
        calls={"grace_s": 0.05},
    )
    async with run_gateway(values) as running:
        yield running


async def post(gateway: RunningGateway, headers: dict[str, str], path: str, **body: Any) -> httpx.Response:
    return await gateway.http.post(path, headers=headers, json={"model": "m", "max_tokens": 4, **body})


async def chat(gateway: RunningGateway, headers: dict[str, str], **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await post(gateway, headers, "/v1/chat/completions", messages=messages, **body)


async def legacy(gateway: RunningGateway, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await post(gateway, headers, "/v1/completions", **body)


def refused(response: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


async def idle(gateway: RunningGateway) -> None:
    await until(lambda: gateway.services.limits.running == 0, "every place is free again")


async def test_each_reply_is_a_call(gateway: RunningGateway) -> None:
    _, headers = await gateway.open(mode="eval")
    assert len((await chat(gateway, headers, n=6)).json()["choices"]) == 6
    await idle(gateway)
    gateway.slot.hold()
    waiting = asyncio.create_task(chat(gateway, headers, n=5))
    await until(lambda: len(gateway.model.pool.calls) == 5, "five calls wait")
    assert gateway.services.limits.running == 5
    busy = await chat(gateway, headers, n=4)  # the ninth of eight
    refused(busy, 429, "too_many_calls")
    assert int(busy.headers["retry-after"]) >= 1
    refused(await legacy(gateway, headers, prompt=["a", "b"], n=2), 429, "too_many_calls")
    gateway.let_in()
    assert (await waiting).status_code == 200
    await idle(gateway)
    assert len((await legacy(gateway, headers, prompt=["a", "b"], n=2, best_of=2)).json()["choices"]) == 4
    await idle(gateway)


async def test_2048_replies_do_not_pass_under_one_ticket(gateway: RunningGateway) -> None:
    episode, headers = await gateway.open(mode="eval")
    refused(await chat(gateway, headers, n=9), 400, "too_many_replies", "n")
    response = await legacy(gateway, headers, prompt=["a"] * 16, n=128)
    refused(response, 400, "too_many_replies", "prompt")
    assert "2048 replies" in response.json()["error"]["message"]
    assert "[limits.episode] calls" in response.json()["error"]["message"]
    assert (await gateway.admin.trajectory(episode))["nodes"] == []
    await idle(gateway)


async def test_a_request_that_could_never_wait_is_refused_and_one_that_cannot_now_is_refused_whole(
    gateway: RunningGateway,
) -> None:
    _, headers = await gateway.open(mode="eval")
    _, other = await gateway.open(mode="eval")
    response = await chat(gateway, headers, n=7)
    refused(response, 400, "too_many_replies", "n")
    assert "[queue] max_waiting" in response.json()["error"]["message"]
    gateway.slot.hold()
    waiting = asyncio.create_task(chat(gateway, headers, n=4))
    await until(lambda: len(gateway.model.pool.calls) == 4, "four calls wait")
    refused(await chat(gateway, other, n=3), 503, "queue_full")
    assert len(gateway.model.pool.calls) == 4, "none of the three was begun"
    gateway.let_in()
    assert (await waiting).status_code == 200
    await idle(gateway)


async def test_replies_of_an_upstream_count_too(tiny_model: Path, tmp_path: Path) -> None:
    there, port = Elsewhere(), free_port()
    limits = {"episode": {"calls": 4}}
    async with behind(tiny_model, tmp_path, port, limits=limits) as gateway:
        _, headers = await gateway.open("task")
        response = await chat(gateway, headers, model="oracle", n=5)
        refused(response, 400, "too_many_replies", "n")
        response = await legacy(gateway, headers, model="oracle", prompt=["a", "b"], best_of=3)
        refused(response, 400, "too_many_replies", "prompt")
    assert there.requests == []


@pytest.mark.parametrize(
    ("body", "replies"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": "many", "best_of": -1}, 1),
        ({"prompt": "a b", "n": 2}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2, 3]], "n": 2}, 4),
        ({"prompt": []}, 1),
    ],
)
async def test_the_replies_of_an_upstream_request_are_counted(body: dict[str, Any], replies: int) -> None:
    assert replies_of(body)[0] == replies
