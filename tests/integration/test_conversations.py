"""Conversations become token trees: extended where they go on, branched where they differ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.client import GatewayRefused
from headgate.types import EpisodeSampling
from tests.harness.agents import client_of
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.records import check_sampled_by_the_fake, nodes_of, path_to
from tests.harness.scripted import USER

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    """A fake engine; training asks for temperature 0.8 to 1.2, full top_p and at most 50 tokens, and ignores seeds."""
    values = settings_for(
        tiny_model,
        tmp_path_factory.mktemp("conversations"),
        models={"demo": {"path": str(tiny_model), "thinking": False}},
        sampling={
            "temperature": {"min": 0.8, "max": 1.2},
            "top_p": {"override": 1.0},
            "seed": "ignore",
            "max_tokens": {"max": 50},
        },
    )
    async with run_gateway(values) as running:
        yield running


async def ask(client: Any, messages: list[Any], **kwargs: Any) -> str:
    kwargs = {"model": "m", "max_tokens": 12, **kwargs}
    response = await client.chat.completions.create(messages=messages, **kwargs)
    return response.choices[0].message.content


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


async def check_all(gateway: RunningGateway, nodes: list[dict[str, Any]]) -> None:
    for node in nodes:
        if node["sampled"]:
            check_sampled_by_the_fake(nodes, node, {0: gateway.settings.model.path.resolve()})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_that_goes_on_extends_the_recorded_tokens(
    gateway: RunningGateway, stream: bool
) -> None:
    async with client_of(gateway, mode="eval") as (client, episode):
        messages: list[dict[str, Any]] = [USER]
        for turn in range(3):
            if stream:
                chunks = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=12, stream=True
                )
                reply = "".join([c.choices[0].delta.content or "" async for c in chunks])
            else:
                reply = await ask(client, messages)
            messages += [assistant(reply), {"role": "user", "content": f"and then? {turn}"}]
    nodes = await nodes_of(gateway, episode)
    assert [node["sampled"] for node in nodes] == [False, True] * 3
    assert [node["parent"] for node in nodes] == [-1, 0, 1, 2, 3, 4]
    assert all(node["at"] == len(nodes[node["parent"]]["ids"]) for node in nodes[1:])
    calls = (await gateway.admin.episode(episode))["calls"]
    assert [call["used"]["bridged"] for call in calls] == [False, True, True]
    for before, after in ((1, 3), (3, 5)):
        recorded = path_to(nodes, nodes[before]) + nodes[before]["ids"]
        assert path_to(nodes, nodes[after])[: len(recorded)] == recorded
    assert [call["prompt_tokens"] for call in calls] == [len(path_to(nodes, nodes[i])) for i in (1, 3, 5)]
    await check_all(gateway, nodes)


async def test_training_episodes_use_the_configured_sampling_and_eval_episodes_what_was_requested(
    gateway: RunningGateway,
) -> None:
    requested = {"temperature": 0.0, "top_p": 0.5, "seed": 3}
    for mode, used in (
        ("train", {"temperature": 0.8, "top_p": 1.0, "seed": None}),
        ("eval", {"temperature": 0.0, "top_p": 1.0, "seed": 3}),
    ):
        async with client_of(gateway, mode=mode) as (client, episode):
            await ask(client, [USER], **requested)
            (call,) = (await gateway.admin.episode(episode))["calls"]
            assert {name: call["requested"][name] for name in requested} == requested
            assert {name: call["used"][name] for name in used} == used
            (turn,) = [node for node in await nodes_of(gateway, episode) if node["sampled"]]
            assert turn["temperature"] == pytest.approx(used["temperature"])
            assert set(turn["flags"]) == ({""} if mode == "train" else {"GREEDY"})
            await gateway.admin.abandon(episode, "done")


async def test_what_the_engine_makes_of_a_temperature_and_a_seed_is_sent_and_recorded(
    gateway: RunningGateway,
) -> None:
    """vLLM samples temperatures below 0.01 at 0.01, and seed -1 is none to it."""
    requested = {"temperature": 1e-50, "seed": -1}
    used = {"temperature": 0.01, "seed": None}
    async with client_of(gateway, mode="eval") as (client, episode):
        await ask(client, [USER], **requested)
        (call,) = (await gateway.admin.episode(episode))["calls"]
        assert {name: call["requested"][name] for name in requested} == requested
        assert {name: call["used"][name] for name in used} == used
        (turn,) = [node for node in await nodes_of(gateway, episode) if node["sampled"]]
        assert turn["temperature"] == pytest.approx(0.01)
        assert set(turn["flags"]) == {""}


async def test_an_eval_episode_may_set_the_sampling_of_its_calls(tiny_model: Path, tmp_path: Path) -> None:
    """So greedy evaluation needs no other agent. A gateway that was started again goes on like that."""
    values = settings_for(tiny_model, tmp_path)
    requested = {"temperature": 0.7, "top_p": 0.5, "seed": 3}
    given = {
        "greedy": EpisodeSampling(temperature=0.0),
        "drawn": EpisodeSampling(temperature=0.5, top_p=1.0, seed="ignore"),
    }
    used = {
        "greedy": {"temperature": 0.0, "top_p": 1.0, "seed": 3},
        "drawn": {"temperature": 0.5, "top_p": 1.0, "seed": None},
    }
    opened: dict[str, tuple[str, dict[str, str]]] = {}
    async with run_gateway(values) as gateway:
        for name, sampling in given.items():
            opened[name] = await gateway.open(name, mode="eval", sampling=sampling)
            assert (await gateway.chat(opened[name][1], max_tokens=4, **requested)).status_code == 200
    async with run_gateway(values) as gateway:
        for name, (episode, headers) in opened.items():
            assert (await gateway.chat(headers, max_tokens=4, **requested)).status_code == 200
            calls = (await gateway.admin.episode(episode))["calls"]
            assert len(calls) == 2
            for call in calls:
                assert {key: call["requested"][key] for key in requested} == requested
                assert {key: call["used"][key] for key in requested} == used[name]
        with pytest.raises(GatewayRefused, match=r'mode = "eval"; \[sampling\]') as error:
            await gateway.admin.open_episode("t", sampling=given["greedy"])
        assert (error.value.status, error.value.code) == (400, "invalid_value")


async def test_only_requested_parameters_are_stored_as_requested(gateway: RunningGateway) -> None:
    async with client_of(gateway, mode="eval") as (client, episode):
        await ask(client, [USER])
    (call,) = (await gateway.admin.episode(episode))["calls"]
    assert call["requested"] == {"model": "m", "max_tokens": 12}
    assert call["used"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": None,
        "max_tokens": 12,
        "bridged": False,
    }


@pytest.mark.parametrize(("mode", "used"), [("train", 50), ("eval", 90)])
async def test_training_bounds_the_tokens_of_a_reply(gateway: RunningGateway, mode: Any, used: int) -> None:
    async with client_of(gateway, mode=mode) as (client, episode):
        response = await client.chat.completions.create(
            model="m", messages=[USER], max_tokens=90, extra_body={"ignore_eos": True}
        )
    (call,) = (await gateway.admin.episode(episode))["calls"]
    assert response.choices[0].finish_reason == "length"
    assert (call["requested"]["max_tokens"], call["used"]["max_tokens"]) == (90, used)
    assert call["completion_tokens"] == call["used"]["min_tokens"] == used
    (turn,) = [node for node in await nodes_of(gateway, episode) if node["sampled"]]
    assert set(turn["flags"]) == {"CONSTRAINED"}, "the end of the reply was forbidden"
