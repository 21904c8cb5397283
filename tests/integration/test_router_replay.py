"""With `router_replay` a trainer gets the experts of every token, as the version computed them that sampled the next one.

The truth is the fake engine's own function of the weights, the position and the token.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.engines.fake.routes import token_routes
from headgate.routes import Routes, router_shape
from headgate.types import Episode
from tests.harness.barrier import arrived, hold_after, release
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import LONG_S, until
from tests.harness.weights import fake_weights, identity_of, probe_of, publish
from trainer.loop.agreement import check_routers

CONFIG = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
ROUTERS = router_shape(CONFIG)
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def mixture(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "mixture"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | CONFIG))
    return folder


@pytest.fixture
def newer(mixture: Path, tmp_path: Path) -> Path:
    source = fake_weights(tmp_path / "source", "version 1")
    shutil.copy(mixture / "config.json", source)
    return publish(source, tmp_path / "v1", 1, 0, probe_of(source, mixture))


@pytest.fixture
def values(mixture: Path, tmp_path: Path) -> dict[str, Any]:
    values = settings_for(mixture, tmp_path, staleness={"batch": 1, "eta": 2, "min_members": 1})
    values["models"]["demo"]["router_replay"] = True
    return values


def expected(weights: Path, position: int, token: int) -> list[list[int]]:
    assert ROUTERS is not None
    rows = token_routes(identity_of(weights), position, token, ROUTERS)
    return [rows[layer] for layer in ROUTERS.layers]


def path_of(episode: Episode) -> tuple[list[int], list[int], Routes]:
    """Return the tokens of an episode that is one conversation, their versions (-1: of a prompt), and their routes."""
    ids, versions, rows = list[int](), list[int](), list[Routes]()
    for node in episode.nodes:
        assert len(ids) == len(np.concatenate([n.ids for n in episode.nodes[: node.index]] or [[]]))
        ids += node.ids.tolist()
        versions += node.versions.tolist() or [-1] * len(node.ids)
        assert node.routes is not None
        rows.append(node.routes.array())
    return ids, versions, np.concatenate(rows)


async def leased(gateway: RunningGateway, episode: str) -> Episode:
    """Reward an episode, which fills a batch; return it as a trainer gets it."""
    await gateway.admin.reward(episode, 1.0)
    lease = await gateway.admin.lease("trainer")
    (group,) = (await gateway.admin.leased_groups(lease)).groups
    return group.episodes[0]


async def counted(gateway: RunningGateway) -> dict[str, float]:
    page = (await gateway.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("headgate_routes_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_each_token_has_the_routes_of_the_version_that_sampled_the_next(
    mode: str, values: dict[str, Any], mixture: Path, newer: Path
) -> None:
    async with run_gateway({**values, "update": {"mode": mode}}, in_process=False) as gateway:
        await gateway.fake("faults", endless=True)
        await hold_after(gateway, 3)
        check_routers(ROUTERS, (await gateway.admin.status())["routers"])
        episode, headers = await gateway.open(group_size=1)
        call = asyncio.create_task(gateway.chat(headers, messages=[HELLO], max_tokens=8), name="call")
        await arrived(gateway, 1)
        publication = gateway.admin.publish(1, str(newer), wait_s=LONG_S)
        if mode == "keep":  # the barrier counts a request's tokens, and this one stays
            published = asyncio.create_task(publication, name="publication")
            await until(lambda: gateway.slot.state == "held", "the update has begun")
            await release(gateway)
            await published
        else:
            await publication
            await release(gateway)
        reply = (await call).json()["choices"][0]["message"]
        await gateway.chat(headers, messages=[HELLO, reply, HELLO], max_tokens=5)
        ids, versions, routes = path_of(await leased(gateway, episode))
        assert await counted(gateway) == {"recorded": len(ids) - 1, "missing": 0, "impossible": 0}
    assert {-1, 0, 1} == set(versions)
    first = versions.index(1)  # from here on everything is computed by the new weights
    for at, (token, row) in enumerate(zip(ids[:-1], routes, strict=False)):
        assert row.tolist() == expected(newer if at + 1 >= first else mixture, at, token), at
    assert (routes[-1] == -1).all(), "the last token was never computed"


async def test_tokens_whose_engine_died_have_none_and_a_stop_string_loses_none(
    values: dict[str, Any], mixture: Path
) -> None:
    async with run_gateway(values, in_process=False) as gateway:
        await gateway.fake("faults", endless=True)
        episode, headers = await gateway.open(group_size=1)
        stopped = await gateway.chat(headers, messages=[HELLO], max_tokens=400, stop=list("aeio"))
        choice = stopped.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        await hold_after(gateway, 3)
        messages = [HELLO, choice["message"], HELLO]
        call = asyncio.create_task(
            gateway.chat(headers, messages=messages, max_tokens=6, stream=True), name="call"
        )
        await until(lambda: bool(gateway.slot.runs) and _sampled(gateway) == 3, "its tokens have arrived")
        os.killpg(gateway.slot.process.process.pid, signal.SIGKILL)
        assert (await call).status_code == 200
        ids, versions, routes = path_of(await leased(gateway, episode))
        assert await counted(gateway) == {"recorded": len(ids) - 4, "missing": 3, "impossible": 0}
    begin = len(versions) - versions[::-1].index(-1)  # of the second reply
    for at, (token, row) in enumerate(zip(ids[:-1], routes, strict=False)):
        lost = begin - 1 <= at < begin + 2
        assert row.tolist() == ([[-1, -1]] * 2 if lost else expected(mixture, at, token)), at


def _sampled(gateway: RunningGateway) -> int:
    (run,) = gateway.slot.runs.values()
    return len(run.call.turn.ids)
