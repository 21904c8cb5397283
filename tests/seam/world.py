"""Two gateways in a cluster before a fake engine, in this event loop; and everybody who talks to the one that follows."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.api.middleware.episode_prefix import split
from gateway.client import GatewayClient
from tests.harness.clusters import Cluster, run_cluster
from tests.seam.checker import Report
from tests.seam.hostile import conversation, talk
from tests.seam.ordinary import Client

ROOT, PROJECT, AGENTS = (
    "the-key-of-root-itself",
    "the-key-of-the-project",
    ("the-key-of-agent-a", "the-key-of-agent-b"),
)
_ADMINS, _CALLERS = {ROOT, PROJECT}, {*AGENTS}
_AGENT = {"max_episodes": 1_000_000, "idle_s": 2.0}


@asynccontextmanager
async def seam(store: str, model: Path, work: Path) -> AsyncIterator[Cluster]:
    """The cluster, on the database `store`."""
    given: dict[str, Any] = {
        "models": {"demo": {"path": str(model), "aliases": []}},
        "admin": {"key": ROOT},
        "projects": {"p": {"key": PROJECT, "models": ["demo"]}},
        "agents": {name: {"key": key, **_AGENT} for name, key in zip("ab", AGENTS, strict=True)},
    }
    async with run_cluster(store, model, work, **given) as cluster:
        yield cluster


async def fuzz(
    cluster: Cluster,
    seed: int,
    seconds: float,
    *,
    clients: int = 6,
    hostile: int = 24,
    until: Callable[[Report], bool] = lambda _: False,
    say: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Lets ordinary and hostile clients talk to the follower, for so long or `until` the report says so."""
    report, ends = Report(), time.monotonic() + seconds
    follower = cluster.followers[0]

    def over() -> bool:
        say(report)
        return time.monotonic() > ends or until(report)

    async with GatewayClient(follower.url, ROOT) as admin:
        opened = await admin.open_episode("fuzz", mode="eval")
    keys = {"root": ROOT, "project": PROJECT, "a": AGENTS[0], "b": AGENTS[1], "none": "", "wrong": "nobody"}
    keys["episode"] = opened.api_key
    callers = itertools.cycle(
        [
            ("root", "root"),
            ("agent", "a"),
            ("root", "project"),
            ("agent", "b"),
            ("episode", "episode"),
            ("nobody", "none"),
        ]
    )
    ordinary = [
        Client(f"c{n}", kind, keys[key], follower.url, report)
        for n, (kind, key) in enumerate(itertools.islice(callers, clients))
    ]
    with _witnessed(cluster, report):
        async with asyncio.TaskGroup() as group:
            for n, client in enumerate(ordinary):
                group.create_task(client.run(f"{seed}/{n}", over), name=f"client-{n}")
            for n in range(hostile):
                work = _attack(f"{seed}/h{n}", n, follower.url, keys, report, over)
                group.create_task(work, name=f"hostile-{n}")
    return report


async def _attack(
    seed: str, number: int, url: str, keys: dict[str, str], report: Report, over: Callable[[], bool]
) -> None:
    port = urlsplit(url).port
    assert port is not None
    for n in itertools.count():
        if over():
            return
        owner = f"h{number}{n:08d}"
        report.hostile(owner, await talk(port, conversation(f"{seed}/{n}", owner, keys)))


@contextmanager
def _witnessed(cluster: Cluster, report: Report) -> Iterator[None]:
    """Every request that comes to the coordinator, before it looks at it."""
    app = cluster.coordinator.app
    stack = app.middleware_stack

    async def witness(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            report.reached(scope["method"], scope["path"], _is_good(scope))
        await stack(scope, receive, send)

    app.middleware_stack = witness
    try:
        yield
    finally:
        app.middleware_stack = stack


def _is_good(scope: Any) -> bool:
    """Returns whether a request's key may have what it asks for."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    bearer = headers.get(b"authorization", "").removeprefix("Bearer ")
    if split(scope["path"])[1].startswith("/admin/"):
        return bearer in _ADMINS
    return (bearer or headers.get(b"x-api-key", "")) in _CALLERS
