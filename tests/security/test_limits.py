"""Limits per key: refused before anything is rendered, with 429, and given back however a call ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import Settings
from gateway.episodes.callers import Caller
from gateway.tenancy.limits import EpisodeQuota, Limits, Ticket
from gateway.tenancy.projects import Projects
from headgate.errors import BadRequest, Busy
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = "the-root-key-of-everything"
AGENT = "the-key-of-an-agent-here"
PROJECT = "the-key-of-the-project"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
async def gateway(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    limits = {
        "episode": {"calls": 1, "tokens_per_minute": 400},
        "agent": {"calls": 1},
        "project": {"calls": 3, "episodes": 4},
    }
    values = settings_for(
        tiny_model,
        tmp_path_factory.mktemp("limits"),
        admin={"key": ROOT},
        limits=limits,
        projects={"p": {"key": PROJECT, "models": ["demo"]}},
        agents={"a": {"key": AGENT, "max_episodes": 100}},
        calls={"grace_s": 0.05},
        server={"keep_alive_s": 0.05},
    )
    async with run_gateway(values) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def given_back(gateway: RunningGateway) -> AsyncIterator[None]:
    """After every test nothing is held any more, however its calls ended."""
    yield
    gateway.let_in()
    await gateway.fake("faults", delay_s=0.0)
    await until(lambda: gateway.services.limits.running == 0, "every place is free again")
    for episode in await gateway.admin.episodes(state="open"):
        await gateway.admin.abandon(episode["id"], "test")


def hold(gateway: RunningGateway) -> None:
    gateway.slot.hold()


async def chat(gateway: RunningGateway, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await gateway.chat(headers, **{"max_tokens": 4, **body})


async def waiting(gateway: RunningGateway, headers: dict[str, str], count: int = 1) -> asyncio.Task[Any]:
    """A call that waits for its engine."""
    task = asyncio.create_task(chat(gateway, headers))
    await until(lambda: len(gateway.model.pool.calls) == count, "the call waits")
    return task


def refused(response: httpx.Response, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (429, code), response.text
    assert int(response.headers["retry-after"]) >= 1


async def test_calls_of_an_episode_are_limited(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(gateway)
    _, headers = await gateway.open(mode="eval")
    _, other = await gateway.open(mode="eval")
    first = await waiting(gateway, headers)

    async def render(*_: Any) -> None:
        raise AssertionError("a refused call was rendered")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.model.recorder, "prepare", render)
        patch.setattr(gateway.model.renderer, "render", render)
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
            ("/v1/responses/input_tokens", {"input": "hi"}),
        ):
            response = await gateway.http.post(path, headers=headers, json={"model": "m", **body})
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1, (
                path,
                response.text,
            )
    second = await waiting(gateway, other, 2)
    gateway.let_in()
    assert (await first).status_code == (await second).status_code == 200
    assert (await chat(gateway, headers)).status_code == 200


async def test_calls_of_an_agent_are_limited(gateway: RunningGateway) -> None:
    hold(gateway)
    headers = {"Authorization": f"Bearer {AGENT}"}
    first = await waiting(gateway, headers)
    opened = len(await gateway.admin.episodes(state="open"))
    refused(await chat(gateway, headers), "too_many_calls")
    assert len(await gateway.admin.episodes(state="open")) == opened  # a refused call opens nothing
    gateway.let_in()
    assert (await first).status_code == 200


async def test_calls_of_a_project_are_limited(gateway: RunningGateway) -> None:
    hold(gateway)
    callers = [(await gateway.open(mode="eval"))[1] for _ in range(4)]
    tasks = [await waiting(gateway, headers, i + 1) for i, headers in enumerate(callers[:3])]
    refused(await chat(gateway, callers[3]), "too_many_calls")
    gateway.let_in()
    assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 3


async def test_open_episodes_of_a_project_are_limited(gateway: RunningGateway) -> None:
    body = {"task_id": "t", "mode": "eval"}
    key = {"Authorization": f"Bearer {PROJECT}"}

    async def open_one() -> httpx.Response:
        return await gateway.http.post("/admin/v1/episodes", headers=key, json=body)

    responses = await asyncio.gather(
        *(open_one() for _ in range(9))
    )  # concurrently, so none may slip through
    assert sorted(response.status_code for response in responses) == [200] * 4 + [429] * 5
    refused(await open_one(), "too_many_episodes")
    refused(await chat(gateway, {"Authorization": f"Bearer {AGENT}"}), "too_many_episodes")
    opened = next(response.json()["episode_id"] for response in responses if response.is_success)
    await gateway.admin.abandon(opened, "room")
    assert (await open_one()).status_code == 200


async def test_tokens_of_a_minute_are_limited(gateway: RunningGateway) -> None:
    _, headers = await gateway.open(mode="eval")
    began = time.monotonic()
    response = await chat(gateway, headers, messages=[{"role": "user", "content": "x" * 600}], max_tokens=16)
    assert response.status_code == 200 and response.json()["usage"]["total_tokens"] > 400
    response = await chat(gateway, headers)
    refused(response, "too_many_tokens")
    wait_s = int(response.headers["retry-after"]) + time.monotonic() - began
    assert wait_s > 20, "a debt of more than 200, at 400 a minute"
    _, other = await gateway.open(mode="eval")
    assert (await chat(gateway, other)).status_code == 200


async def test_places_are_given_back_however_calls_end(gateway: RunningGateway) -> None:
    """Errors, engines that fail, clients that leave before the first token and in the middle, episodes that end."""
    episode, headers = await gateway.open(mode="eval")

    async def free(what: str) -> None:
        await until(lambda: gateway.services.limits.running == 0, what)

    for body in ({"temperature": 9}, {"model": 3}, {"messages": []}, {"messages": [{"role": "x"}]}, {"n": 0}):
        assert (await chat(gateway, headers, **body)).status_code == 400
        await free(str(body))
    await gateway.http.post("/v1/chat/completions", headers=headers, content=b"{")
    await free("no JSON")
    for stream in (False, True):
        hold(gateway)
        gone = await waiting_stream(gateway, headers, stream)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await free(f"left before the first token, stream={stream}")
        gateway.let_in()
        await until(lambda: not gateway.model.pool.calls, "the call is over")
    await gateway.fake("faults", delay_s=0.05)
    async with gateway.http.stream(
        "POST",
        "/v1/chat/completions",
        headers=headers,
        json={"model": "m", "messages": MESSAGES, "stream": True},
    ) as response:
        async for _ in response.aiter_lines():
            break
    await free("left in the middle")
    hold(gateway)
    task = asyncio.create_task(chat(gateway, headers, messages=[{"role": "user", "content": "other"}]))
    await until(lambda: bool(gateway.model.pool.calls), "the call waits")
    await gateway.admin.abandon(episode, "over")
    assert (await task).status_code == 409
    await free("the episode was closed")


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_places_are_given_back_whatever_serves_a_call(gateway: RunningGateway, path: str) -> None:
    """Starlette's routes match a path with a newline at its end, and the fast path does not."""
    _, headers = await gateway.open(mode="eval")
    content = (
        {"prompt": "hi"}
        if path == "completions"
        else {"input": "hi"}
        if path == "responses"
        else {"messages": MESSAGES}
    )
    most = "max_output_tokens" if path == "responses" else "max_tokens"
    for end in ("", "%0A"):
        body = {"model": "demo", most: 4, **content}
        response = await gateway.http.post(f"/v1/{path}{end}", headers=headers, json=body)
        assert response.status_code == 200, response.text
        await until(lambda: gateway.services.limits.running == 0, f"the place is free after {path}{end}")


async def waiting_stream(gateway: RunningGateway, headers: dict[str, str], stream: bool) -> asyncio.Task[Any]:
    task = asyncio.create_task(chat(gateway, headers, stream=stream))
    await until(lambda: bool(gateway.model.pool.calls), "the call waits")
    return task


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _limits(tiny_model: Path | str, clock: Clock) -> Limits:
    settings = Settings.parse(
        {
            "models": {"demo": {"path": str(tiny_model)}},
            "admin": {"key": ROOT},
            "projects": {"p": {"key": PROJECT, "models": ["demo"]}},
            "agents": {name: {"key": f"the-key-of-agent-{name}"} for name in "abc"},
            "limits": {
                "agent": {"calls": 2, "tokens_per_minute": 100},
                "project": {"calls": 3, "tokens_per_minute": 250},
            },
        }
    )
    return Limits(settings, Projects(settings), clock)


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "end", "again", "draw", "raise"]), st.integers(0, 9), st.floats(0, 5)
    ),
    max_size=80,
)


@given(steps)
async def test_counters_never_leak(happened: list[tuple[str, int, float]]) -> None:
    """However calls begin and end (also twice, and by exceptions), what is counted is what runs, and refusals take nothing."""
    clock = Clock()
    limits, running, over = _limits("/m", clock), [], []
    for what, number, later in happened:
        clock.now += later
        before = limits.running
        if what in ("admit", "raise"):
            agent = "abc"[number % 3]
            own = [name for name, _ in running].count(agent)
            ticket = None
            with suppress(Busy):
                ticket = limits.admit(Caller("", "demo", None, agent))
            if ticket is None:
                assert limits.running == before
                continue
            assert own < 2 and len(running) < 3
            if what == "admit":
                room = min(2 - own, 3 - len(running))
                replies = 1 + number % 4
                if replies > 2:  # more than the key may ever have
                    with pytest.raises(BadRequest, match="2 concurrent calls"):
                        ticket.count_replies(replies, "n")
                elif replies > room:
                    with pytest.raises(Busy):
                        ticket.count_replies(replies, "n")
                else:
                    ticket.count_replies(replies, "n")
                    running += [(agent, ticket)] * (replies - 1)
                running.append((agent, ticket))
                continue
            with pytest.raises(ZeroDivisionError), ticket:
                raise ZeroDivisionError
            over.append(ticket)
        elif what == "end" and running:
            _, ticket = running[number % len(running)]
            ticket.end()
            running = [held for held in running if held[1] is not ticket]
            over.append(ticket)
        elif what == "again" and over:
            over[number % len(over)].end()
        elif what == "draw" and (running or over):
            tickets: list[Ticket] = [*(ticket for _, ticket in running), *over]
            tickets[number % len(tickets)].draw(number * 7)
        assert limits.running == 2 * len(running)  # of the agents, and of their project
    for _, ticket in running:
        ticket.end()
    assert limits.running == 0
    clock.now += 3600
    for agent in "abc":
        limits.admit(Caller("", "demo", None, agent)).end()


async def test_who_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import gateway.tenancy.limits as limits_

    monkeypatch.setattr(limits_, "_SWEEP_AT", 8)
    settings = Settings.parse({"models": {"demo": {"path": "/m"}}, "limits": {"episode": {"calls": 1}}})
    limits = Limits(settings, Projects(settings))

    class Episode:
        id = ""

    for number in range(1000):
        episode = Episode()
        episode.id = f"ep-{number}"
        limits.admit(Caller("", "demo", episode)).end()  # type: ignore[arg-type]
    assert len(limits._usage) < 100


async def test_refusals_come_back_at_different_times() -> None:
    limits = _limits("/m", Clock())
    held = [limits.admit(Caller("", "demo", None, "a")) for _ in range(2)]
    after = set()
    for _ in range(20):
        with pytest.raises(Busy) as busy:
            limits.admit(Caller("", "demo", None, "a"))
        after.add(busy.value.retry_after)
    assert len(after) > 5
    for ticket in held:
        ticket.end()


class Named:
    """The part of an episode that limits see."""

    def __init__(self, id: str, model: str = "demo") -> None:
        self.id, self.model = id, model


async def test_calls_of_an_agent_count_for_it_whatever_their_episodes_are() -> None:
    limits = _limits("/m", Clock())
    for number in range(2):
        limits.admit(Caller("", "demo", Named(f"ep-{number}"), "a"))  # type: ignore[arg-type]
    with pytest.raises(Busy, match="this agent has 2 calls"):
        limits.admit(Caller("", "demo", Named("ep-3"), "a"))  # type: ignore[arg-type]


async def test_tokens_are_drawn_from_the_agent_and_from_its_project() -> None:
    clock = Clock()
    limits = _limits("/m", clock)
    with limits.admit(Caller("", "demo", None, "a")) as ticket:
        ticket.draw(300)
    with pytest.raises(Busy, match="this agent has used its 100 tokens"):
        limits.admit(Caller("", "demo", None, "a"))
    with pytest.raises(Busy, match="this project has used its 250 tokens") as busy:
        limits.admit(Caller("", "demo", None, "b"))
    assert busy.value.retry_after >= 12  # a debt of 50, at 250 a minute
    clock.now += 13
    limits.admit(Caller("", "demo", None, "b")).end()


async def test_episodes_of_another_project_take_no_room() -> None:
    models = {name: {"path": "/m"} for name in ("one", "two")}
    projects = {name: {"key": f"the-key-of-project-{name}", "models": [name]} for name in models}
    given = {
        "models": models,
        "projects": projects,
        "limits": {"project": {"episodes": 1}},
        "admin": {"key": ROOT},
    }
    quota = EpisodeQuota(Settings.parse(given))
    with quota.reserve("one", ["two"]):
        with pytest.raises(Busy), quota.reserve("one", []):
            raise AssertionError("it came in")
        with quota.reserve("two", []):
            pass
