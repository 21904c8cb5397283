"""Weight updates in a cluster: whichever process a call runs in, its tokens are of the versions that they are recorded under.

The fake engine's tokens show which weights sampled them, and after which context.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headgate.client import GatewayClient
from tests.harness.agents import sdk
from tests.harness.clusters import LIMIT_S, Cluster, Member, placed, run_cluster
from tests.harness.records import check_sampled_by_the_fake
from tests.harness.servers import PostgresServer
from tests.harness.waiting import result_of, until

PINNED = {"presence_penalty": 0.5}
AGENTS = 10
MODES = pytest.mark.parametrize(
    "cluster", ["abort", pytest.param("keep", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture
async def cluster(
    request: pytest.FixtureRequest, postgres: PostgresServer, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[Cluster]:
    """Three members, two engines."""
    store = postgres.url(postgres.new_database())
    update = {"mode": request.param, "order": "rolling"}
    async with run_cluster(store, tiny_model, tmp_path, members=3, engines=2, update=update) as running:
        for engine in running.engines:
            engine.set_faults({"endless": True})
        yield running


def hold_after(cluster: Cluster, tokens: int) -> None:
    for engine in cluster.engines:
        engine.hold_after(tokens)


async def arrived(cluster: Cluster, requests: int) -> None:
    await until(
        lambda: sum(engine.held for engine in cluster.engines) == requests,
        f"{requests} requests are at the barrier",
    )


def release(cluster: Cluster) -> None:
    for engine in cluster.engines:
        engine.set_faults({"hold_after": None, "hold_load": False})


class Agent:
    """Stream one reply after the other, each from the next member, until `done` is set."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.counts: list[int] = []
        self.lost = 0
        self.episode = ""

    async def run(self, done: asyncio.Event) -> None:
        async with self.cluster.admin() as admin:
            opened = await admin.open_episode("t", mode="eval")
        self.episode = opened.episode_id
        while not done.is_set():
            members = self.cluster.members
            await self.call(opened, members[(self.number + len(self.counts)) % len(members)])

    async def call(self, opened: Any, member: Member) -> None:
        question: Any = {"role": "user", "content": f"agent {self.number}, call {len(self.counts)}"}
        pinned: Any = PINNED if self.pinned else {}
        client = sdk(opened, max_retries=4).with_options(base_url=f"{member.url}/v1")
        try:
            stream = await client.chat.completions.create(
                model="m", messages=[question], stream=True, logprobs=True, max_tokens=50, **pinned
            )
            choices = [choice async for chunk in stream for choice in chunk.choices]
        except openai.APIError as error:
            if not self.pinned or error.code != "call_lost":
                raise
            self.lost += 1
            return
        assert choices[-1].finish_reason in ("stop", "length")
        self.counts.append(sum(len(c.logprobs.content or []) for c in choices if c.logprobs))

    @property
    def pinned(self) -> bool:
        """True if its calls cannot leave their engine; then they may be lost with a coordinator."""
        return self.number % 5 == 4


async def check(
    admin: GatewayClient, agents: list[Agent], versions: dict[int, Path], *, unsure: bool = False
) -> int:
    """Check that nothing is lost, doubled or mislabeled; return how often a turn continued under another version.

    `unsure`: a run may have been cut after its weights had changed, so that no engine reported which of its tokens came before.
    """
    crossed = 0
    for agent in agents:
        nodes = (await admin.trajectory(agent.episode))["nodes"]
        turns = [node for node in nodes if node["sampled"]]
        whole = [turn for turn in turns if turn["mask_reason"] != "abandoned"]
        assert [len(turn["ids"]) for turn in whole] == agent.counts, "received is recorded"
        for turn in turns:
            assert turn["mask_reason"] == "" or agent.lost
            if not agent.pinned:  # the fake engine's penalties are not in what it is checked against
                check_sampled_by_the_fake(nodes, turn, versions, unsure=unsure, endless=True)
            crossed += len(turn["versions"]) - 1
    return crossed


@pytest.mark.parametrize("cluster", ["keep", pytest.param("abort", marks=pytest.mark.long)], indirect=True)
async def test_streams_of_every_process_cross_updates_under_their_true_versions(
    cluster: Cluster, versions: dict[int, Path]
) -> None:
    done = asyncio.Event()
    agents = [Agent(cluster, i) for i in range(AGENTS)]
    tasks = [asyncio.create_task(agent.run(done), name=f"agent-{agent.number}") for agent in agents]
    async with cluster.admin(cluster.followers[0]) as admin:
        for version in (1, 2, 3):
            hold_after(cluster, 2 * version)
            await arrived(cluster, AGENTS)
            record = await admin.publish(version, str(versions[version]), wait_s=600)
            assert record["state"] == "live", record
            assert all(report["failure"] == "" for report in record["report"]), record
            assert sum(report["streams"] for report in record["report"]) >= AGENTS, (
                "more if some moved between"
            )
        done.set()
        release(cluster)
        await asyncio.gather(*tasks)
        assert not any(agent.lost for agent in agents)
        assert await check(admin, agents, versions) == 3 * AGENTS, "each in each update"
    assert [engine.label for engine in cluster.engines] == ["3", "3"]


@MODES
async def test_another_process_takes_over_in_the_middle_of_an_update(
    cluster: Cluster, versions: dict[int, Path]
) -> None:
    """The coordinator leaves while an engine loads; calls of the others only wait, and the version is published again."""
    first = cluster.coordinator
    done = asyncio.Event()
    agents = [Agent(cluster, i) for i in range(10)]
    cluster.members.remove(first)  # agents call the others
    tasks = [asyncio.create_task(agent.run(done), name=f"agent-{agent.number}") for agent in agents]
    try:
        hold_after(cluster, 3)
        await arrived(cluster, 10)
        engine = cluster.engines[0]
        engine.set_faults({"hold_load": True})
        async with cluster.admin(first) as admin:
            await admin.publish(1, str(versions[1]), wait_s=0)
        await until(lambda: engine.paused, "an engine is in the middle of its update")
    finally:
        cluster.members.append(first)
    await cluster.stop(first)
    engine.set_faults({"hold_load": False})
    await until(
        lambda: any(placed(m) and m.role == "coordinator" for m in cluster.members), "there is a successor"
    )
    async with cluster.admin() as admin:
        record = await admin.publish(1, str(versions[1]), wait_s=600)
        assert record["state"] == "live", record
        hold_after(cluster, 6)
        await arrived(cluster, 10)
        release(cluster)
        done.set()
        await asyncio.gather(*tasks)
        await check(admin, agents, versions, unsure=True)
    assert not any(member.lost for member in cluster.members)


@MODES
async def test_a_coordinator_that_is_stopped_changes_no_engine_once_its_links_have_ended(
    cluster: Cluster, versions: dict[int, Path]
) -> None:
    """Otherwise it would change weights under calls of processes that it can no longer notify. It ends slowly here,
    while one engine has loaded, and another one loads."""
    first, done = cluster.coordinator, asyncio.Event()
    hub, membership = first.services.hub, first.services.membership
    asserted = asyncio.Event()
    for other in cluster.followers:
        wait_for(asserted, other.services.membership._election)
    crossing, ending, close, cross = asyncio.Event(), asyncio.Event(), membership.close, hub.begin_weight_swap

    async def late() -> None:
        await ending.wait()
        await close()

    def noted(*values: Any) -> Any:
        crossing.set()
        return cross(*values)

    membership.close, hub.begin_weight_swap = late, noted
    hold_after(cluster, 3)
    agents = [Agent(cluster, 5 * i + 4) for i in range(8)]  # their calls stay in their engines
    cluster.members.remove(first)
    tasks = [asyncio.create_task(agent.run(done), name=f"agent-{agent.number}") for agent in agents]
    await arrived(cluster, 8)
    loading = cluster.engines[0]
    for engine in cluster.engines:
        engine.set_faults({"hold_load": True})
    async with cluster.admin(first) as admin:
        await admin.publish(1, str(versions[1]), wait_s=0)
    await until(lambda: loading.paused, "an engine is in the middle of its update")
    cluster.members.append(first)
    stopping = asyncio.create_task(cluster.stop(first), name="stopping")
    await until(lambda: hub._closing, "its links have ended")
    loading.set_faults({"hold_load": False})
    await result_of(crossing.wait(), "the hub was requested to report the swap", LIMIT_S)
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        for _ in range(20):  # more than what it still wants of the engine would take
            await http.get(f"{first.services.models.local['demo'].pool.slots['demo-0'].url}/is_paused")
    ending.set()
    await stopping
    assert loading.paused, "it got no further command"
    asserted.set()
    release(cluster)
    await until(
        lambda: any(placed(m) and m.role == "coordinator" for m in cluster.members), "there is a successor"
    )
    async with cluster.admin() as admin:
        assert (await admin.publish(1, str(versions[1]), wait_s=600))["state"] == "live"
        done.set()
        await asyncio.gather(*tasks)
        for agent in agents:
            turns = [n for n in (await admin.trajectory(agent.episode))["nodes"] if n["sampled"]]
            assert {turn["mask_reason"] for turn in turns} <= {"", "abandoned"}
    assert not any(member.lost for member in cluster.members)


def wait_for(event: asyncio.Event, election: Any) -> None:
    """A process is not elected before an event."""
    claim = election._claim

    async def later(over: int | None) -> Any:
        await event.wait()
        return await claim(over)

    election._claim = later


async def test_an_engine_that_was_restarted_from_outside_samples_nothing_under_a_wrong_version(
    postgres: PostgresServer, tiny_model: Path, tmp_path: Path, versions: dict[int, Path]
) -> None:
    """Its connections are new, and it does not have the label that it was given: that is found out before a token is taken."""
    store = postgres.url(postgres.new_database())
    routing = {
        "rule": "cached"
    }  # with `gain` all may stay in the engine that has their prefixes, and the other gets no request
    async with (
        run_cluster(store, tiny_model, tmp_path, engines=2, routing=routing) as cluster,
        cluster.admin() as admin,
    ):
        await admin.publish(1, str(versions[1]), wait_s=600)
        opened = [await admin.open_episode(f"t{i}", mode="eval") for i in range(12)]
        for _ in range(2):
            await cluster.restart_engine(0)
            calls = [cluster.members[i % 2].chat(o.api_key, max_tokens=12) for i, o in enumerate(opened)]
            assert {response.status_code for response in await asyncio.gather(*calls)} == {200}
            await until(lambda: cluster.engines[0].label == "1", "it runs version 1 again")
            await until(lambda: all(map(placed, cluster.members)), "and is open")
        for episode in opened:
            nodes = (await admin.trajectory(episode.episode_id))["nodes"]
            for turn in (node for node in nodes if node["sampled"]):
                assert turn["mask_reason"] == ""
                check_sampled_by_the_fake(nodes, turn, versions)
