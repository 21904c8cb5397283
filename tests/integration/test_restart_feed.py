"""A gateway that crashes between any two events, or is killed while one is on its way, goes on as if nothing had happened.

Two truths that the gateway has no part in: what an uninterrupted run shows after every action, and what the client's acknowledged
actions must have put into every batch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.engines.fake import FakeEngine, create_fake_app
from headgate.client.admin import GatewayClient, GatewayRefused
from headgate.processes.ports import free_port
from headgate.types import Group, Lease, TokenFlag
from tests.harness import programs
from tests.harness.gateways import run_gateway, serve, settings_for
from tests.harness.stores import crashed
from tests.harness.weights import fake_weights, publish

Action = tuple[str, ...]

SCRIPT: list[Action] = [
    ("open", "a0", "a", "2"),
    ("call", "a0"),
    ("lease", "trainer"),
    ("open", "b0", "b", "1"),
    ("open", "a1", "a", "2"),
    ("call", "b0"),
    ("reward", "b0", "0.5"),
    ("call", "a1"),
    ("reward", "a1", "1.0"),
    ("renew",),
    ("reward", "a0", "0.25"),
    ("publish", "1"),
    ("ack",),
    ("open", "c0", "c", "2"),
    ("open", "d0", "d", "1"),
    ("open", "c1", "c", "2"),
    ("call", "c1"),
    ("abandon", "d0"),
    ("abandon", "c0"),
    ("lease", "trainer"),
    ("reward", "c1", "0.75"),
    ("open", "e0", "e", "1"),
    ("call", "e0"),
    ("nack",),
    ("reward", "e0", "0.0"),
    ("lease", "another"),
    ("ack",),
    ("open", "b2", "b", "1"),
    ("reward", "b2", "2.0"),
]
"""Batches of two groups, eta 1. `open` names an episode, its group and the group's size."""

TRUTH = {0: {"b": {"b0": 0.5}, "a": {"a0": 0.25, "a1": 1.0}}, 1: {"c": {"c1": 0.75}, "e": {"e0": 0.0}}}
"""The trained batches' content: groups in the order they finished, rewarded episodes in the order they were opened."""


class Driver:
    """Run the actions of a script, with its names for episodes in place of their ids."""

    def __init__(self, url: str, work: Path) -> None:
        self.admin = GatewayClient(url)
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self._work = work
        self.keys: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.sampled: dict[str, int] = {}
        self.lease: Lease | None = None

    async def close(self) -> None:
        await self.admin.close()
        await self.http.aclose()

    async def do(self, action: Action) -> None:
        match action:
            case ("open", name, group, size):
                opened = await self.admin.open_episode(group, group, int(size))
                self.ids[name], self.keys[name] = opened.episode_id, opened.api_key
                self.names[opened.episode_id] = name
            case ("call", name):
                body = {"model": "any", "max_tokens": 6, "messages": [{"role": "user", "content": name}]}
                headers = {"Authorization": f"Bearer {self.keys[name]}"}
                response = await self.http.post("/v1/chat/completions", json=body, headers=headers)
                self.sampled[name] = response.raise_for_status().json()["usage"]["completion_tokens"]
            case ("reward", name, value):
                await self.admin.reward(self.ids[name], float(value))
            case ("abandon", name):
                await self.admin.abandon(self.ids[name], "crashed")
            case ("lease", consumer):
                self.lease = await self.admin.lease(consumer)
            case ("publish", version):
                source = self._work / f"source-{version}"
                if not source.exists():
                    publish(
                        fake_weights(source, version),
                        self._work / f"v{version}",
                        int(version),
                        int(version) - 1,
                    )
                path = str(self._work / f"v{version}")
                assert (await self.admin.publish(int(version), path, wait_s=60))["state"] == "live"
            case (kind,):
                assert self.lease is not None
                await self._of_lease(kind, self.lease)

    async def _of_lease(self, kind: str, lease: Lease) -> None:
        match kind:
            case "renew":
                await self.admin.renew(lease)
            case "ack":
                await self.admin.ack(lease, "checkpoint")
                self.lease = None
            case "nack":
                await self.admin.nack(lease, "out of memory")
                self.lease = None

    async def again(self, action: Action) -> None:
        """An action whose response was lost: it is sent once more, and an effect that exists already is not an error."""
        try:
            await self.do(action)
        except GatewayRefused as refusal:
            if (action[0], refusal.code) == ("abandon", "episode_closed"):
                return
            if action[0] not in ("ack", "nack") or refusal.code != "no_lease":
                raise
            self.lease = None

    # What it sees

    async def view(self) -> dict[str, Any]:
        """The ledger, what the lease gives, and every trained batch, without ids and times."""
        shown = await self.admin.staleness()
        for group in shown["slowest"]:
            assert group.pop("oldest_s") >= 0
            group["episodes"] = [self.names[episode] for episode in group["episodes"]]
        if shown["lease"]:
            assert self.lease is not None
            assert shown["lease"].pop("lease_id") == self.lease.lease_id
            assert 0 < shown["lease"].pop("left_s") <= self.lease.deadline_s
        batches = [row["batch"] for row in await self.admin.batches()]
        leased = (await self.admin.leased_groups(self.lease)) if self.lease else None
        stories = [(await self.admin.why(e))["verdict"] for e in self.ids.values()]
        return {
            "staleness": shown,
            "leased": leased and (self.groups(leased.groups), leased.cursor, leased.complete),
            "trained": {b: self.groups(await self.admin.batch_groups(b)) for b in batches},
            "verdicts": dict(zip(self.ids, stories, strict=True)),
        }

    def groups(self, groups: tuple[Group, ...]) -> list[Any]:
        return [
            (group.group_id, group.version, group.batch, [
                (self.names[episode.episode_id], episode.reward, [
                    (node.parent, node.at, *(array.tolist() for array in (node.ids, node.logprobs, node.versions, node.flags)))
                    for node in episode.nodes
                ]) for episode in group.episodes
            ]) for group in groups
        ]  # fmt: skip


@asynccontextmanager
async def world(model: Path, work: Path) -> AsyncIterator[tuple[dict[str, Any], Driver]]:
    """An engine that outlives gateways, settings for these, and a driver of them."""
    work.mkdir()
    port = free_port()
    values = settings_for(
        model,
        work,
        engine={"launch": "external", "url": f"http://127.0.0.1:{port}"},
        staleness={"batch": 2, "eta": 1, "min_members": 1},
        feed={"lease_s": 3600},
    )
    driver = Driver(f"http://127.0.0.1:{values['server']['port']}", work)
    async with serve(create_fake_app(FakeEngine("none")), port):
        try:
            yield values, driver
        finally:
            await driver.close()


@asynccontextmanager
async def killable(model: Path, work: Path) -> AsyncIterator[tuple[programs.Program, Driver]]:
    """A gateway in a process of its own."""
    async with world(model, work) as (values, driver):
        gateway = programs.gateway(values, work / "gateway.log")
        try:
            await gateway.start()
            yield gateway, driver
        finally:
            gateway.kill()


@pytest.fixture(scope="module")
def uninterrupted() -> list[dict[str, Any]]:
    """The state after every action in a run without a kill; filled by the first test that needs it."""
    return []


async def expected(model: Path, work: Path, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not views:
        async with world(model, work) as (values, driver), run_gateway(values, in_process=False):
            for action in SCRIPT:
                await driver.do(action)
                views.append(await driver.view())
            check_truth(driver, views[-1])
    return views


def check_truth(driver: Driver, view: dict[str, Any]) -> None:
    """The batches hold the effects of the client's actions, and no token that it did not receive."""
    held = {
        batch: {group_id: {name: reward for name, reward, _ in members} for group_id, _, _, members in groups}
        for batch, groups in view["trained"].items()
    }
    assert held == TRUTH
    assert [list(batch) for batch in held.values()] == [list(batch) for batch in TRUTH.values()]
    for batch, groups in view["trained"].items():
        for _, version, own, members in groups:
            assert version <= own == batch <= version + 1
            for name, _, nodes in members:
                versions, flags = ([x for node in nodes for x in node[i]] for i in (4, 5))
                assert len(versions) == driver.sampled[name]
                assert all(v >= batch - 1 for v in versions)
                assert not any(f & TokenFlag.LATE for f in flags)


async def test_a_crash_after_any_event_is_not_seen(
    tiny_model: Path, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    """After each, the next gateway finds what is committed, and no more; the orderly end of the one before was never recorded."""
    views = await expected(tiny_model, tmp_path / "whole", uninterrupted)
    async with world(tiny_model, tmp_path / "crashed") as (values, driver):
        before: dict[str, Any] | None = None
        for number, (action, view) in enumerate(zip(SCRIPT, views, strict=True)):
            async with run_gateway(values, in_process=False):
                assert before is None or await driver.view() == before, SCRIPT[number - 1]
                await driver.do(action)
                values["store"] = {"url": crashed(values["store"]["url"], tmp_path / f"{number}.db")}
            before = view
        async with run_gateway(values, in_process=False):
            assert await driver.view() == before, SCRIPT[-1]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_killed_while_an_event_is_on_its_way(
    tiny_model: Path, tmp_path: Path, uninterrupted: list[dict[str, Any]], every: bool
) -> None:
    """The client sends the event twice. Whether the first one was received or not, the second leaves what one would have left.

    `every`: at each such event, and not only at the first of each kind.
    """
    draw, left = random.Random(1), ["reward", "abandon", "ack", "nack", "renew"]
    views = await expected(tiny_model, tmp_path / "whole", uninterrupted)
    async with killable(tiny_model, tmp_path / "killed") as (gateway, driver):
        for action, view in zip(SCRIPT, views, strict=True):
            if action[0] in left:
                if not every:
                    left.remove(action[0])
                first = asyncio.create_task(driver.do(action))
                await asyncio.sleep(draw.uniform(0.0, 0.015))
                gateway.kill()
                await asyncio.wait({first})
                await gateway.start()
                if first.exception() is None:
                    assert await driver.view() == view, action
                    continue
                assert isinstance(first.exception(), httpx.TransportError)
                await driver.again(action)
            else:
                await driver.do(action)
            assert await driver.view() == view, action
