"""Engines, clients and gateways that go away: nothing is lost, nothing is doubled."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from gateway.app import open_services
from gateway.config.settings import Settings
from headgate.errors import EngineError
from headgate.processes.ports import free_port
from tests.harness.agents import sdk
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import check_sampled_by_the_fake, nodes_of
from tests.harness.retries import taken
from tests.harness.scripted import USER
from tests.harness.waiting import LONG_S, until, within
from tests.harness.weights import fake_weights, publish


@pytest.fixture
async def gateway(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway that soon gives up what could be resumed; batches of two groups, eta 1."""
    staleness = {"batch": 2, "eta": 1, "min_members": 1}
    values = settings_for(tiny_model, tmp_path, staleness=staleness, calls={"grace_s": 0.2})
    async with run_gateway(values) as running:
        yield running


async def abandoned(gateway: RunningGateway, episode: str) -> list[dict[str, Any]]:
    """The nodes of an episode whose only call was abandoned."""

    async def recorded() -> bool:
        return bool((await gateway.admin.episode(episode))["calls"])

    await until(recorded, "the abandoned branch is recorded")
    (call,) = (await gateway.admin.episode(episode))["calls"]
    assert call["finish_reason"] == "abandoned"
    return await nodes_of(gateway, episode)


async def test_a_streaming_client_that_goes_away_stops_the_engine(
    gateway: RunningGateway, tiny_model: Path
) -> None:
    await hold_after(gateway, 3)
    opened = await gateway.admin.open_episode("task")
    async with sdk(opened) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[USER],  # type: ignore[list-item]
            stream=True,
            logprobs=True,
        )
        await arrived(gateway, 1)
        await taken(gateway, 3)
        await stream.close()
        await until(lambda: gateway.engine.running == 0, "the engine stops")
    nodes = await abandoned(gateway, opened.episode_id)
    assert (nodes[-1]["mask_reason"], len(nodes[-1]["ids"])) == ("abandoned", 3)
    check_sampled_by_the_fake(nodes, nodes[-1], {0: tiny_model.resolve()})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_before_the_first_token_stops_the_engine(
    gateway: RunningGateway, stream: bool
) -> None:
    await hold_after(gateway, 0)
    episode, headers = await gateway.open("task")
    call = asyncio.create_task(gateway.chat(headers, stream=stream), name="call")
    await arrived(gateway, 1)
    call.cancel()
    await until(lambda: gateway.engine.running == 0, "the engine stops")
    (live,) = gateway.services.episodes._live.values()
    await until(lambda: not live.calls, "nothing is left of the call")
    assert await nodes_of(gateway, episode) == []


async def test_a_client_that_goes_away_while_it_waits_for_an_engine_waits_no_more(
    gateway: RunningGateway,
) -> None:
    gateway.slot.hold()
    _, headers = await gateway.open("task")
    call = asyncio.create_task(gateway.chat(headers, stream=True), name="call")
    await until(lambda: gateway.model.pool.waiting == 1, "the call waits")
    call.cancel()
    await until(lambda: gateway.model.pool.waiting == 0, "it waits no more")


async def test_abandoned_tokens_are_fed_but_marked_as_not_to_be_trained(gateway: RunningGateway) -> None:
    await hold_after(gateway, 3)
    episode, headers = await gateway.open("task")
    body = {"model": "m", "messages": [USER], "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        async for _ in response.aiter_lines():
            break
        await taken(gateway, 3)
    await abandoned(gateway, episode)
    await release(gateway)
    assert (await gateway.chat(headers, max_tokens=4)).status_code == 200
    await gateway.admin.reward(episode, 1.0)
    lease = await gateway.admin.lease("trainer")
    (group,) = (await gateway.admin.leased_groups(lease)).groups
    sampled = [node for node in group.episodes[0].nodes if node.sampled]
    assert [node.mask_reason for node in sampled] == ["abandoned", ""]
    assert [node.parent for node in sampled] == [0, 0]


async def test_a_restart_on_the_same_database_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    values = settings_for(
        tiny_model,
        tmp_path,
        models={"demo": {"path": str(tiny_model), "thinking": False}},
        staleness={"batch": 2, "min_members": 1},
    )
    new = publish(fake_weights(tmp_path / "one", "one"), tmp_path / "v1", 1, 0)
    async with run_gateway(values) as gateway:
        done, _ = await gateway.begin("done")
        await gateway.admin.reward(done, 1.0)
        await gateway.admin.publish(1, str(new), wait_s=60)
        episode, headers = await gateway.open("open")
        first = await gateway.chat(headers, max_tokens=12)
        assert first.status_code == 200
        lease = await gateway.admin.lease("trainer")
        before = await gateway.admin.status()
    async with run_gateway(values) as gateway:
        after = await gateway.admin.status()
        for name in ("version", "weights", "consumed", "free_slots", "batches", "episodes", "open_episodes"):
            assert after[name] == before[name], name
        messages = [
            USER,
            {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]},
            {"role": "user", "content": "go on"},
        ]
        assert (await gateway.chat(headers, messages=messages, max_tokens=12)).status_code == 200
        nodes = await nodes_of(gateway, episode)
        assert [node["parent"] for node in nodes] == [-1, 0, 1, 2]
        for turn in (nodes[1], nodes[3]):
            assert turn["versions"][0][0] == 1
            check_sampled_by_the_fake(nodes, turn, {1: new})
        assert (await gateway.admin.lease("trainer")).fence > lease.fence
        await gateway.admin.reward(episode, 1.0)
        assert (await gateway.admin.episode(done))["reward"] == 1.0


async def test_a_gateway_that_is_alone_does_not_wait_for_an_external_engine_that_is_not_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One of a cluster does: its engines may come later."""
    external = {"launch": "external", "url": f"http://127.0.0.1:{free_port()}", "max_restarts": 0}
    values = settings_for(tiny_model, tmp_path, engine={**external, "start_s": 3600.0})
    with pytest.raises(EngineError, match="demo-0 cannot be used"):
        async with within("the start is given up"), open_services(Settings.parse(values)):
            pytest.fail("it started")


async def test_a_write_that_fails_loses_that_call_alone(gateway: RunningGateway) -> None:
    async def execute(statement: str) -> None:
        await gateway.services.database.submit(lambda c: c.execute(text(statement)))

    episode, headers = await gateway.open("task")
    assert (await gateway.chat(headers, max_tokens=4, seed=1)).status_code == 200
    before = await nodes_of(gateway, episode)
    await execute("CREATE TRIGGER full BEFORE INSERT ON calls BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    response = await gateway.chat(headers, max_tokens=4, seed=2)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert await nodes_of(gateway, episode) == before
    await execute("DROP TRIGGER full")
    assert (await gateway.chat(headers, max_tokens=4, seed=3)).status_code == 200
    nodes = await nodes_of(gateway, episode)
    assert [node["index"] for node in nodes] == [0, 1, 2]
    check_sampled_by_the_fake(nodes, nodes[2], {0: gateway.settings.model.path.resolve()}, seed=3)


async def test_a_client_that_does_not_read_holds_nothing_up(tiny_model: Path, tmp_path: Path) -> None:
    """The engine is read at its own pace: it is done, and is updated, while the client has not taken a byte."""
    model = tmp_path / "endless"
    shutil.copytree(tiny_model, model)
    (model / "block.json").write_text('{"first": 65, "size": 10}')
    length = 1900
    async with run_gateway(settings_for(model, tmp_path)) as gateway:
        await gateway.engine.load(str(model))
        _, headers = await gateway.open(mode="eval")
        body = json.dumps(
            {"model": "m", "messages": [USER], "stream": True, "max_tokens": length, "logprobs": True}
        ).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.settings.server.port))
            head = f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: {headers['Authorization']}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: gateway.engine.sampled >= length, "the engine has sampled everything")
            await until(lambda: gateway.slot.streams == 0, "and is free")
            new = publish(fake_weights(tmp_path / "one", "one"), tmp_path / "v1", 1, 0)
            assert (await gateway.admin.publish(1, str(new), wait_s=60))["state"] == "live"
            client.settimeout(LONG_S)
            response = await asyncio.to_thread(read_all, client)
        assert b"data: [DONE]" in response[-40:]
        events = [json.loads(event) for event in re.findall(rb"data: (\{.*?\})\n\n", response)]
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
        assert len(text) == length


def read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts).partition(b"\r\n\r\n")[2]
