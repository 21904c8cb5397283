"""URLs as graders, against a server on a socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from gateway.grading.base import GradingFailed, Score
from gateway.grading.url import UrlGrader
from headgate.processes.ports import free_port
from tests.harness.gateways import serve
from tests.harness.waiting import until


class Server:
    """Respond with the next of `responses`: a status and a body."""

    def __init__(self) -> None:
        self.responses: deque[tuple[int, str]] = deque()
        self.bodies: list[Any] = []
        self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/grade")(self.grade)
        return app

    async def grade(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.running += 1
        self.most = max(self.most, self.running)
        await self.gate.wait()
        self.running -= 1
        status, body = self.responses.popleft() if self.responses else (200, '{"reward": 1}')
        return Response(body, status, media_type="application/json")


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    made, port = Server(), free_port()
    async with serve(made.app(), port):
        yield made, f"http://127.0.0.1:{port}/grade"


async def test_the_episode_is_posted_and_the_reward_is_served(server: tuple[Server, str]) -> None:
    there, url = server
    there.responses.append((200, '{"reward": -0.5, "why": "short"}'))
    grader = UrlGrader(url, 1, 60.0)
    given = {"episode_id": "e", "metadata": {"unicode": "ä"}}
    assert (await grader.grade(given)).reward == -0.5
    assert there.bodies == [given]
    await grader.close()


@pytest.mark.parametrize(
    ("status", "body", "final"),
    [
        (500, "boom", False),
        (503, "", False),
        (429, "slow down", False),
        (400, "bad", True),
        (404, "none", True),
        (422, "no", True),
        (302, "", True),
        (200, "not json", False),
        (200, "[1]", False),
        (200, '{"score": 1}', False),
        (200, '{"reward": "1"}', False),
        (200, '{"reward": NaN}', False),
    ],
)
async def test_what_is_no_reward_and_what_another_try_would_not_change(
    server: tuple[Server, str], status: int, body: str, final: bool
) -> None:
    there, url = server
    there.responses.append((status, body))
    grader = UrlGrader(url, 1, 60.0)
    words = f"responded with {status}" if status != 200 else "responded with"
    with pytest.raises(GradingFailed, match=rf"(?s)127\.0\.0\.1.*{words}") as error:
        await grader.grade({})
    assert error.value.final == final
    await grader.close()


async def test_a_server_that_is_not_there_may_come_back() -> None:
    grader = UrlGrader(f"http://127.0.0.1:{free_port()}/grade", 1, 60.0)
    with pytest.raises(GradingFailed, match="Connect") as error:
        await grader.grade({})
    assert not error.value.final
    await grader.close()


async def test_a_server_that_is_silent_is_left(server: tuple[Server, str]) -> None:
    there, url = server
    there.gate.clear()
    grader = UrlGrader(url, 1, 0.5)
    with pytest.raises(GradingFailed, match=r"did not respond within 0\.5 s") as error:
        await grader.grade({})
    assert not error.value.final
    there.gate.set()
    await grader.close()


async def test_concurrent_requests_are_bounded(server: tuple[Server, str]) -> None:
    there, url = server
    there.gate.clear()
    grader = UrlGrader(url, 2, 60.0)
    grading = [asyncio.create_task(grader.grade({})) for _ in range(6)]
    await until(lambda: there.running == 2, "two requests run")
    later = UrlGrader(url, 1, 60.0)
    marked = asyncio.create_task(later.grade({}))
    await until(lambda: there.running > 2, "what was sent after them has come, too")
    assert there.running == 3, "the others were held back"
    there.gate.set()
    assert await asyncio.gather(*grading, marked) == [Score(1.0)] * 7
    assert there.most == 3
    await grader.close()
    await later.close()


async def test_a_response_that_is_nested_too_deep_is_none(server: tuple[Server, str]) -> None:
    there, url = server
    grader = UrlGrader(url, 1, 60.0)
    for response in ("[" * 5000, '{"reward": ' * 3000 + "1" + "}" * 3000):
        there.responses.append((200, response))
        with pytest.raises(GradingFailed, match="nested"):
            await grader.grade({"episode_id": "e"})
    await grader.close()
