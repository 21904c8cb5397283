"""The HTTP seam between two gateways: raw sockets and ordinary clients call the follower, and no response may be another's.

The gateways run in this event loop, on a real database, with a fake engine, so that a mutant can be put into them.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.api.middleware.episode_prefix import split
from headgate.client import GatewayClient
from tests.faults.checker import Report
from tests.faults.mutants import Mutant
from tests.faults.real.hostile import conversation, talk
from tests.faults.real.ordinary import Client
from tests.faults.real.tags import Tags
from tests.harness.clusters import Cluster, run_cluster
from tests.harness.models import save_model
from tests.harness.servers import postgres_server
from tests.harness.stores import postgres_store

ROOT, PROJECT, AGENTS = (
    "the-key-of-root-itself",
    "the-key-of-the-project",
    ("the-key-of-agent-a", "the-key-of-agent-b"),
)
_ADMINS, _CALLERS = {ROOT, PROJECT}, {*AGENTS}
_CLIENTS = (
    *(("root", "root"), ("agent", "a"), ("root", "project")),
    *(("agent", "b"), ("episode", "episode"), ("stranger", "none")),
)
"""The kind and the key of each ordinary client."""
_MUTANT_S = 60.0
"""The longest that a mutant may take to be caught."""
_AGENT = {"max_episodes": 1_000_000, "idle_s": 2.0}


@asynccontextmanager
async def seam(store: str, model: Path, work: Path) -> AsyncIterator[Cluster]:
    """Run the cluster, on the database `store`."""
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
    show: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Let ordinary and hostile clients call the follower, for some seconds or `until` it returns True for the report."""
    tags, ends = Tags(), time.monotonic() + seconds
    follower = cluster.followers[0]

    def over() -> bool:
        show(tags.report)
        return time.monotonic() > ends or until(tags.report)

    async with GatewayClient(follower.url, ROOT) as admin:
        opened = await admin.open_episode("fuzz", mode="eval")
    keys = {"root": ROOT, "project": PROJECT, "a": AGENTS[0], "b": AGENTS[1], "none": "", "wrong": "unknown"}
    keys["episode"] = opened.api_key
    callers = itertools.islice(itertools.cycle(_CLIENTS), clients)
    ordinary = [Client(f"c{n}", kind, keys[key], follower.url, tags) for n, (kind, key) in enumerate(callers)]
    with _witnessed(cluster, tags):
        async with asyncio.TaskGroup() as group:
            for n, client in enumerate(ordinary):
                group.create_task(client.run(f"{seed}/{n}", over), name=f"client-{n}")
            for n in range(hostile):
                work = _attack(f"{seed}/h{n}", n, follower.url, keys, tags, over)
                group.create_task(work, name=f"hostile-{n}")
    return tags.report


async def run(
    seed: int,
    seconds: float,
    clients: int,
    hostile: int,
    mutants: list[Mutant],
    show: Callable[[Report], None],
) -> tuple[Report, list[tuple[Mutant, str, Report]]]:
    """Fuzz a cluster, and then one with each mutant until it is caught."""
    with tempfile.TemporaryDirectory(prefix="headgate-seam-") as folder, postgres_server() as postgres:
        model, work = Path(folder) / "model", Path(folder) / "work"
        work.mkdir()
        await asyncio.to_thread(save_model, model, seed=1)
        async with seam(postgres_store(postgres), model, work) as cluster:
            report = await fuzz(cluster, seed, seconds, clients=clients, hostile=hostile, show=show)
        trials = []
        for mutant in mutants:
            async with seam(postgres_store(postgres), model, work) as cluster:
                with mutant.put_in():
                    trials.append((mutant, "", await fuzz(cluster, seed, _MUTANT_S, until=mutant.caught_by)))
    return report, trials


async def _attack(
    seed: str, number: int, url: str, keys: dict[str, str], tags: Tags, over: Callable[[], bool]
) -> None:
    port = urlsplit(url).port
    assert port is not None
    for n in itertools.count():
        if over():
            return
        owner = f"h{number}{n:08d}"
        tags.check_hostile(owner, await talk(port, conversation(f"{seed}/{n}", owner, keys)))


@contextmanager
def _witnessed(cluster: Cluster, tags: Tags) -> Iterator[None]:
    """Check every request that the coordinator receives, before it handles it."""
    app = cluster.coordinator.app
    stack = app.middleware_stack

    async def witness(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            tags.check_forwarded(scope["method"], scope["path"], _is_good(scope))
        await stack(scope, receive, send)

    app.middleware_stack = witness
    try:
        yield
    finally:
        app.middleware_stack = stack


def _is_good(scope: Any) -> bool:
    """Return whether a request's key may have what it requests."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    bearer = headers.get(b"authorization", "").removeprefix("Bearer ")
    if split(scope["path"])[1].startswith("/admin/"):
        return bearer in _ADMINS
    return (bearer or headers.get(b"x-api-key", "")) in _CALLERS
