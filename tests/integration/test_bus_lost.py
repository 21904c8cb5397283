"""The bus loses its content at random moments, under load: nothing that was acknowledged is lost, changed or doubled.

Two gateways of one cluster, agents that hang up and come back to either of them. The truth is the engine's own log: every
log-probability is a mark that names one sampling.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.engines.fake import Faults
from gateway.engines.fake.log import SampleLog
from tests.harness.clusters import Cluster, run_cluster
from tests.harness.expiry import patient_bus
from tests.harness.handovers import StreamedReply, mark
from tests.harness.retries import RETRY
from tests.harness.servers import PostgresServer, RedisServer, redis_server
from tests.harness.waiting import until, within

AGENTS, REQUESTS = 4, 6


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server of the test's own, which it stops."""
    with redis_server() as server:
        yield server


@pytest.fixture
async def cluster(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[Cluster]:
    bus = patient_bus(redis)
    store = postgres.url(postgres.new_database())
    async with run_cluster(store, tiny_model, tmp_path, bus=bus, calls={"grace_s": 0.15}) as running:
        running.engines[0]._log = SampleLog(tmp_path / "engine.jsonl", 1)
        running.engines[0].faults = Faults(delay_s=0.004)
        yield running


class Agent:
    """Send one request after another, disconnect now and then, and retry until each has its reply."""

    def __init__(self, cluster: Cluster, key: str, number: int, dice: random.Random) -> None:
        self.finished: list[StreamedReply] = []
        self.unfinished: list[StreamedReply] = []
        self._members = cluster.members
        self._headers = {"Authorization": f"Bearer {key}"}
        self._number = number
        self._dice = dice

    async def run(self) -> None:
        """Everything it has to ask."""
        for question in range(REQUESTS):
            content = f"agent {self._number} asks {question}"
            body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content}]}
            body |= {"logprobs": True, "stream": self._dice.random() < 0.6, "max_tokens": 60}
            headers: dict[str, str] = {}
            while not await self._ask(body, headers, self._dice.random() < 0.3):
                headers = RETRY
                await asyncio.sleep(self._dice.random() * 0.1)

    async def _ask(self, body: dict[str, Any], headers: dict[str, str], patient: bool) -> bool:
        """Return whether it got the response; an impatient agent may hang up before."""
        reply, url = StreamedReply(), self._dice.choice(self._members).url
        try:
            async with asyncio.timeout(60.0 if patient else self._dice.random() * 0.3):
                await self._read(url, body, headers, reply)
        except (TimeoutError, httpx.HTTPError):
            reply.failed = True
        (self.finished if reply.finish and not reply.failed else self.unfinished).append(reply)
        return self.finished[-1:] == [reply]

    async def _read(
        self, url: str, body: dict[str, Any], headers: dict[str, str], reply: StreamedReply
    ) -> None:
        given = {**self._headers, **headers}
        async with (
            httpx.AsyncClient(base_url=url, timeout=60.0) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=given) as http_response,
        ):
            assert http_response.status_code in (200, 503), await http_response.aread()
            if http_response.status_code == 503:
                reply.failed = True
            elif body["stream"]:
                async for line in http_response.aiter_lines():
                    reply.take(line)
            else:
                whole = json.loads(await http_response.aread())
                reply.id, choice = whole["id"], whole["choices"][0]
                reply.marks = [mark(entry["logprob"]) for entry in choice["logprobs"]["content"]]
                reply.finish = choice["finish_reason"]


async def lose(redis: RedisServer, how: str, dice: random.Random) -> None:
    """Lose the bus again and again."""
    while True:
        await asyncio.sleep(dice.random() * 0.15)
        if how == "flushed":
            await asyncio.to_thread(redis.flush)
        else:
            await asyncio.to_thread(redis.stop)
            await asyncio.sleep(dice.random() * 0.5)
            await asyncio.to_thread(redis.start)
            await asyncio.sleep(dice.random())


@pytest.mark.parametrize("how", ["flushed", "stopped"])
async def test_nothing_is_lost_or_doubled_with_the_bus(
    cluster: Cluster, redis: RedisServer, tmp_path: Path, how: str
) -> None:
    dice = random.Random(11)
    async with cluster.admin() as admin:
        opened = [await admin.open_episode("t") for _ in range(AGENTS)]
        agents = [
            Agent(cluster, o.api_key, number, random.Random(f"{how}{number}"))
            for number, o in enumerate(opened)
        ]
        losing = asyncio.create_task(lose(redis, how, dice), name="lose")
        try:
            async with within("every agent has all its responses", 300):
                await asyncio.gather(*(agent.run() for agent in agents))
        finally:
            losing.cancel()
            await asyncio.wait({losing})
        trees = [(await admin.trajectory(o.episode_id))["nodes"] for o in opened]
        lines = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
        sampled = {line[0]: line[1] for line in lines if isinstance(line, list)}
        times: Counter[int] = Counter()
        for agent, nodes in zip(agents, trees, strict=True):
            turns = [n for n in nodes if n["sampled"]]
            recorded = {turn["call_id"]: [mark(x) for x in turn["logprobs"]] for turn in turns}
            assert len(recorded) == len(turns)
            for turn in turns:
                times.update(recorded[turn["call_id"]])
                assert [sampled[m] for m in recorded[turn["call_id"]]] == turn["ids"]
            finished = {turn["call_id"] for turn in turns if turn["mask_reason"] != "abandoned"}
            assert finished == {reply.id for reply in agent.finished}, (
                "one turn for each answer, and no other"
            )
            assert len(finished) == REQUESTS
            assert all(recorded[reply.id] == reply.marks for reply in agent.finished)
            for reply in agent.unfinished:
                if reply.id in recorded:
                    assert recorded[reply.id][: len(reply.marks)] == reply.marks
    assert max(times.values()) == 1, "no sampling is in two turns"
    if losing.done() and not losing.cancelled():
        losing.result()


class Gate:
    """Hold a member's writes of one kind back until it is opened."""

    def __init__(self, database: Any, kind: str) -> None:
        self.held = asyncio.Event()
        self.open = asyncio.Event()
        self.done = asyncio.Event()
        self._submit = database.submit
        self._kind = kind
        database.submit = self._instead

    def _instead(self, write: Any) -> Any:
        if self._kind not in getattr(write, "insert", write).__qualname__:
            return self._submit(write)
        return asyncio.ensure_future(self._later(write))

    async def _later(self, write: Any) -> Any:
        self.held.set()
        await self.open.wait()
        try:
            return await self._submit(write)
        finally:
            self.done.set()


@pytest.mark.parametrize(("first", "ahead_s"), [("record", 0.0), ("retry", 3600.0), ("retry", -3600.0)])
async def test_a_retry_that_nothing_is_known_of_and_its_call_that_is_being_recorded_are_one_turn(
    cluster: Cluster, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, first: str, ahead_s: float
) -> None:
    """Without the bus, which has forgotten the call; the transaction of either of the two may be the earlier one.

    `ahead_s`: by how much the clock of the first one's host is ahead of the other's.
    """
    one, other = cluster.members
    redis.stop()
    recording, claiming = (
        Gate(one.services.database, "_insert"),
        Gate(other.services.database, "_stored_reply"),
    )
    async with cluster.admin() as admin:
        opened = await admin.open_episode("t")
        agent = Agent(cluster, opened.api_key, 0, random.Random(1))
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "logprobs": True,
            "stream": False,
        }
        clock = time.time
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: clock() + ahead_s)
            asking = asyncio.create_task(agent._read(one.url, body, {}, StreamedReply()), name="asks")
            await recording.held.wait()
        asking.cancel()
        await asyncio.wait({asking})
        reply = StreamedReply()
        again = asyncio.create_task(agent._read(other.url, body, RETRY, reply), name="asks-again")
        await claiming.held.wait()
        gates = [recording, claiming] if first == "record" else [claiming, recording]
        for gate in gates:
            gate.open.set()
            await gate.done.wait()
        await again
        await until(lambda: not one.services.replies._completions, "the first call is over")
        turns = [n for n in (await admin.trajectory(opened.episode_id))["nodes"] if n["sampled"]]
    assert reply.finish == "stop"
    reasons = {turn["call_id"] == reply.id: turn["mask_reason"] for turn in turns}
    assert reasons == ({True: ""} if first == "record" else {True: "", False: "abandoned"})
    assert len(turns) == len(reasons)
