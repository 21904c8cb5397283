"""A running call outlives its gateway process: another one goes on with it, from the last token that any client has seen.

Real processes, killed or stopped by signals, on a real PostgreSQL and a real Redis. The truth is the engine's own log: every
log-probability is a mark that names one sampling (`gateway/engines/fake/log.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.config.settings import Settings
from gateway.engines.fake import FakeEngine, Faults, create_fake_app, next_token
from gateway.engines.fake.log import SampleLog
from gateway.generation.log_format import TOKEN_BYTES
from gateway.render.renderer import ChatRenderer
from headgate.client import GatewayClient
from headgate.processes.ports import free_port
from tests.harness import programs
from tests.harness.clusters import CLUSTER_KEY, run_cluster
from tests.harness.expiry import LEASE_S, end_lease, end_life, lives, patient_bus
from tests.harness.gateways import serve, settings_for
from tests.harness.handovers import StreamedReply, mark
from tests.harness.records import STOP_TOKENS, lasting
from tests.harness.retries import RETRY
from tests.harness.servers import PostgresServer, RedisServer, redis_server
from tests.harness.waiting import until
from tests.harness.weights import identity_of

LIMIT_S = 300.0
HELD_AT = 40
"""The engine stops there in every reply, until a test that kills or stops a process has done so."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@dataclass
class World:
    """Gateway processes of one cluster, and what the engine has done."""

    members: list[programs.Program]
    engine: FakeEngine
    log: Path
    settings: Settings
    episode: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def question(self, seed: int | None = None, **more: Any) -> dict[str, Any]:
        """A request whose reply takes 60 to 120 tokens."""
        messages = lasting(self.settings.model, seed)
        body = {"model": "m", "messages": messages, "logprobs": True, **more}
        return body if seed is None else body | {"seed": seed}

    async def stream(
        self, member: programs.Program, body: dict[str, Any], reply: StreamedReply, **more: str
    ) -> None:
        """Read a streamed reply to its end, whatever that is."""
        try:
            async with (
                httpx.AsyncClient(base_url=member.url, timeout=LIMIT_S) as http,
                http.stream(
                    "POST",
                    "/v1/chat/completions",
                    json={**body, "stream": True},
                    headers={**self.headers, **more},
                ) as http_response,
            ):
                if http_response.status_code != 200:
                    reply.failed = True
                    return
                async for line in http_response.aiter_lines():
                    reply.take(line)
        except httpx.HTTPError:
            reply.failed = True

    def begin(
        self, member: programs.Program, body: dict[str, Any], **more: str
    ) -> tuple[StreamedReply, asyncio.Task[None]]:
        """Start the same in the background."""
        reply = StreamedReply()
        task = asyncio.create_task(self.stream(member, body, reply, **more), name="client")
        self.tasks.append(task)
        return reply, task

    async def retry(self, member: programs.Program, body: dict[str, Any]) -> StreamedReply:
        """Send a request again until it has the whole stream; until a dead process counts as dead, it is refused."""
        reply = StreamedReply()

        async def responded() -> bool:
            nonlocal reply
            reply = StreamedReply()
            await self.stream(member, body, reply, **RETRY)
            return reply.finish is not None

        await until(responded, "the retry has the whole stream", LIMIT_S)
        return reply

    async def whole(self, member: programs.Program, body: dict[str, Any], **more: str) -> httpx.Response:
        """One reply that is not streamed."""
        async with httpx.AsyncClient(base_url=member.url, timeout=LIMIT_S) as http:
            return await http.post("/v1/chat/completions", json=body, headers={**self.headers, **more})

    async def turns(self, member: programs.Program) -> list[dict[str, Any]]:
        """Read the recorded sampled tokens."""
        async with GatewayClient(member.url, None) as admin:
            return [n for n in (await admin.trajectory(self.episode))["nodes"] if n["sampled"]]

    async def check_one_turn(
        self, member: programs.Program, seed: int | None = None
    ) -> tuple[str, list[int]]:
        """One whole turn, every token of it sampled once by the engine, in this order; its call and its marks."""
        turns = await self.turns(member)
        finished = [turn for turn in turns if turn["mask_reason"] != "abandoned"]
        assert len(finished) == 1, f"{len(finished)} finished turns of {len(turns)}"
        turn = finished[0]
        assert turn["mask_reason"] == "" and turn["ids"][-1] == STOP_TOKENS[0]
        marks = [mark(logprob) for logprob in turn["logprobs"]]
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        sampled = {line[0]: line[1] for line in lines if isinstance(line, list)}
        assert [sampled[m] for m in marks] == turn["ids"]
        assert marks == sorted(set(marks)), "once each, and in order"
        context = ChatRenderer.load(self.settings.model).render(self.body["messages"], [])
        weights = identity_of(self.settings.model.path.resolve())
        for token in turn["ids"]:
            assert token == next_token(weights, context, seed, STOP_TOKENS)[0], (
                "sampled after just this context"
            )
            context.append(token)
        return turn["call_id"], marks

    body: dict[str, Any] = field(default_factory=dict)

    def requests(self) -> list[str]:
        """The names of the requests that the engine got."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line["ask"] for line in lines if isinstance(line, dict) and "ask" in line]

    def hold(self) -> None:
        """No reply is whole before `kill` or a test lets them go on: a process may be slower than the engine."""
        self.engine.hold_after(HELD_AT)

    def kill(self, member: programs.Program) -> None:
        """SIGKILL, and wait until every process knows; held replies go on in other processes."""
        member.kill()
        self.engine.release()
        end_life(self.settings.bus, member.pid)
        end_lease(self.settings.store.url, member.pid)

    async def shown(self, reply: StreamedReply, count: int) -> None:
        await until(lambda: len(reply.marks) >= count, f"{count} tokens are shown", LIMIT_S)


@asynccontextmanager
async def run_world(
    postgres: PostgresServer, redis: RedisServer, model: Path, work: Path, members: int = 2, **given: Any
) -> AsyncIterator[World]:
    """Processes of one cluster; the first of them decides. `given`: of `[bus]`."""
    log = work / "engine.jsonl"
    engine, port = FakeEngine("none", log=SampleLog(log, 1)), free_port()
    # Logged so seldom that a stream which showed more than is logged would be found out.
    bus = patient_bus(redis, **given)
    values = settings_for(model, work, calls={"grace_s": 60.0}, bus=bus)
    values["store"] = {"url": postgres.url(postgres.new_database())}
    values["engine"].update(launch="external", urls=[f"http://127.0.0.1:{port}"])
    processes = []
    async with serve(create_fake_app(engine), port):
        try:
            for number in range(members):
                own = free_port()
                cluster = {"key": CLUSTER_KEY, "lease_s": LEASE_S, "url": f"http://127.0.0.1:{own}"}
                given = {**values, "server": {"port": own}, "cluster": cluster}
                given["control"] = {"recording": str(work / f"control-{number}.jsonl")}
                processes.append(programs.gateway(given, work / f"gateway-{number}.log"))
                await processes[-1].start()
            world = World(processes, engine, log, Settings.parse(given))
            async with GatewayClient(processes[0].url, None) as admin:
                opened = await admin.open_episode("task")
            world.episode, world.headers = opened.episode_id, {"Authorization": f"Bearer {opened.api_key}"}
            engine.faults = Faults(delay_s=0.02)
            yield world
            for task in world.tasks:
                task.cancel()
        finally:
            for process in processes:
                process.kill()


@pytest.fixture
async def world(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[World]:
    async with run_world(postgres, redis, tiny_model, tmp_path) as running:
        yield running


async def test_a_stream_whose_coordinator_is_killed_continues_in_another_process(world: World) -> None:
    first, second = world.members
    world.hold()
    world.body = world.question()
    seen, reading = world.begin(first, world.body)
    await world.shown(seen, 15)
    world.kill(first)
    await reading
    assert seen.failed and seen.finish is None
    again = await world.retry(second, world.body)
    assert again.finish == "stop" and again.id == seen.id
    assert again.marks[: len(seen.marks)] == seen.marks, "what was seen is part of it"
    assert await world.check_one_turn(second) == (seen.id, again.marks)
    names = world.requests()
    assert len(names) == len(set(names)) == 2
    later = await world.retry(second, world.body)
    assert (later.id, later.marks) == (again.id, again.marks), "from the record"


async def test_a_whole_reply_whose_follower_is_killed_continues_in_another_process(world: World) -> None:
    second, first = world.members
    world.hold()
    world.body = world.question()
    call = asyncio.create_task(world.whole(first, world.body), name="client")

    async def logged() -> bool:
        async with Redis.from_url(world.settings.bus.url) as bus:
            names = [name async for name in bus.scan_iter(f"{world.settings.bus.prefix}:tokens:*")]
            return bool(names) and await bus.strlen(names[0]) >= 16 * TOKEN_BYTES

    await until(logged, "a part of it is logged", LIMIT_S)
    world.kill(first)
    with pytest.raises(httpx.HTTPError):
        await call
    responses: list[httpx.Response] = []

    async def served() -> bool:
        responses.append(await world.whole(second, world.body, **RETRY))
        return responses[-1].status_code != 503

    await until(served, "the retry is served", LIMIT_S)
    response = responses[-1]
    assert response.status_code == 200, response.text
    call_id, _ = await world.check_one_turn(second)
    assert response.json()["id"] == call_id
    begun, resumed = world.requests()
    assert (begun, resumed.rpartition(".")[0]) == (f"{call_id}.0.0", f"{call_id}.2")
    assert int(resumed.rpartition(".")[2]) >= 16, "it did not start again"


async def test_a_call_with_a_seed_is_sampled_again_from_its_start(world: World) -> None:
    second, first = world.members
    world.hold()
    world.body = world.question(seed=3)
    seen, reading = world.begin(first, world.body)
    await world.shown(seen, 15)
    world.kill(first)
    await reading
    again = await world.retry(second, world.body)
    assert again.finish == "stop" and again.id != seen.id
    assert await world.check_one_turn(second, seed=3) == (again.id, again.marks)


@pytest.mark.parametrize("seed", [None, pytest.param(3, marks=pytest.mark.long)])
async def test_a_retry_joins_its_call_in_a_process_that_is_alive(world: World, seed: int | None) -> None:
    second, first = world.members
    world.body = world.question(seed=seed)
    seen, reading = world.begin(first, world.body)
    await world.shown(seen, 15)
    again, reading_again = world.begin(second, world.body, **RETRY)
    await asyncio.gather(reading, reading_again)
    assert (seen.id, seen.marks, seen.finish) == (again.id, again.marks, "stop")
    assert await world.check_one_turn(second, seed=seed) == (seen.id, seen.marks)
    assert len(world.requests()) == 1


@pytest.mark.long  # it sleeps; tests/unit/gateway/bus/test_handover.py has the same on a clock of its own
async def test_a_process_that_slept_too_long_gives_no_second_reply(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Its engine continued while it slept: when it wakes, its own reply is complete. It must know by its own clock that it
    slept, so this one really sleeps for longer than it counts as alive."""
    async with run_world(postgres, redis, tiny_model, tmp_path, heartbeat_ttl_s=5.0) as world:
        second, first = world.members
        world.hold()
        world.body = world.question()
        seen, reading = world.begin(first, world.body)
        await world.shown(seen, 15)
        os.kill(first.pid, signal.SIGSTOP)
        # A retry before that would be sent on to it, and wait.
        await until(lambda: not lives(world.settings.bus, first.pid), "it counts as dead", LIMIT_S)
        world.engine.release()
        again = await world.retry(second, world.body)
        os.kill(first.pid, signal.SIGCONT)
        await reading
        assert seen.finish is None and seen.failed
        assert again.marks[: len(seen.marks)] == seen.marks
        assert await world.check_one_turn(second) == (again.id, again.marks)
        assert len(await world.turns(second)) == 1, (
            "nothing of it is recorded a second time, not even as abandoned"
        )


async def test_many_retries_at_once_of_many_calls_make_one_reply_each(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    async with run_world(postgres, redis, tiny_model, tmp_path, members=3) as world:
        *others, first = world.members
        world.body = body = world.question()
        bodies = [{**body, "user": str(number)} for number in range(6)]
        begun = [world.begin(first, body) for body in bodies]
        for seen, _ in begun:
            await world.shown(seen, 10)
        world.kill(first)
        await asyncio.gather(*(reading for _, reading in begun))

        retries = [world.retry(others[number % 2], body) for body in bodies for number in range(3)]
        responses = await asyncio.gather(*retries)
        for number, (seen, _) in enumerate(begun):
            same = responses[3 * number : 3 * number + 3]
            assert {response.id for response in same} == {seen.id}
            assert all(response.marks == same[0].marks for response in same)
            assert same[0].marks[: len(seen.marks)] == seen.marks
        turns = await world.turns(others[0])
        assert len(turns) == 6
        marks = [mark(logprob) for turn in turns for logprob in turn["logprobs"]]
        assert len(set(marks)) == len(marks), "no token is in two turns"


async def test_a_process_that_is_stopped_leaves_its_calls_to_others(
    postgres: PostgresServer, redis: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    bus = patient_bus(redis)
    store = postgres.url(postgres.new_database())
    async with run_cluster(store, tiny_model, tmp_path, bus=bus) as cluster:
        engine, first = cluster.engines[0], cluster.members[1]
        engine._log, engine.faults = SampleLog(tmp_path / "engine.jsonl", 1), Faults(delay_s=0.03)
        async with cluster.admin() as admin:
            opened = await admin.open_episode("task")
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        processes: Any = cluster.members  # they have a URL too
        world = World(
            processes, engine, tmp_path / "engine.jsonl", first.services.settings, opened.episode_id, headers
        )
        world.hold()
        world.body = world.question()
        seen, reading = world.begin(processes[1], world.body)
        await world.shown(seen, 15)
        await cluster.stop(first)
        engine.release()
        await reading
        assert seen.finish is None
        again = await world.retry(processes[0], world.body)
        assert (again.id, again.marks[: len(seen.marks)]) == (seen.id, seen.marks)
        assert await world.check_one_turn(processes[0]) == (seen.id, again.marks)
        assert len(await world.turns(processes[0])) == 1, "what was left is not recorded twice"
