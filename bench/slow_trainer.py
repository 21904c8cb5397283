"""A trainer that takes a fixed time per token and does nothing else, and the figures of what it trained.

- *trained*: sampled tokens in the batches that were acknowledged, over the time from the first lease to the last ack;
- *wasted*: sampled tokens of episodes and groups that were dropped, aborted or expired, as a share of wasted + trained; calls
  that still run or wait at the end count for neither;
- *staleness*: the batch's number less the version that sampled the token, of every trained token;
- *idle*: the share of that time in which the trainer waited for a batch.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.endless import Versions
from bench.report import Steps
from headgate.client import GatewayClient
from headgate.types import Group

_WASTED = "dropped", "aborted"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run."""

    batches: int
    batch: int
    """Groups of a batch."""
    group: int
    """Episodes of a group."""
    concurrency: int
    train_s: float
    """Seconds of training per token."""
    median: int
    """Median length of the replies, which are log-normal."""
    sigma: float
    seed: int


@dataclass(slots=True)
class Result:
    """The results of one run."""

    name: str
    eta: int
    tokens: int = 0
    seconds: float = 0.0
    idle_s: float = 0.0
    wasted: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    def add(self, groups: list[Group], batch: int) -> None:
        """Count a batch."""
        for node in (n for g in groups for e in g.episodes for n in e.nodes if n.sampled):
            self.tokens += len(node.ids)
            self.staleness.update((batch - node.versions).tolist())

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        total = sum(self.staleness.values())
        return {
            "name": self.name,
            "eta": self.eta,
            "trained_tokens": self.tokens,
            "seconds": round(self.seconds, 2),
            "tokens_per_s": self.tokens / self.seconds,
            "wasted_share": self.wasted / (self.wasted + self.tokens),
            "staleness_mean": sum(s * n for s, n in self.staleness.items()) / total,
            "staleness_max": max(self.staleness),
            "staleness": {str(s): n for s, n in sorted(self.staleness.items())},
            "idle_share": self.idle_s / self.seconds,
        }


class SlowTrainer:
    """Leases a batch, waits as long as training would take, publishes the next version and acknowledges."""

    def __init__(self, client: GatewayClient, load: Load, versions: Versions) -> None:
        self._client = client
        self._load = load
        self._versions = versions

    async def run(self, result: Result, steps: Steps) -> None:
        """Train all batches of the load."""
        started = time.perf_counter()
        for version in range(1, self._load.batches + 1):
            steps.begin(f"{result.name}: batch {version}")
            waited = time.perf_counter()
            lease = await self._client.lease("bench")
            groups: list[Group] = []
            cursor, complete = 0, False
            while not complete:
                fetched = await self._client.leased_groups(lease, cursor, wait_s=20.0)
                await self._client.renew(lease)
                groups += fetched.groups
                cursor, complete = fetched.cursor, fetched.complete
            result.idle_s += time.perf_counter() - waited
            before = result.tokens
            result.add(groups, lease.batch)
            await asyncio.sleep((result.tokens - before) * self._load.train_s)
            await self._publish(version)
            await self._client.ack(lease, "none")
        result.seconds = time.perf_counter() - started

    async def _publish(self, version: int) -> None:
        record = await self._client.publish(version, str(self._versions.path(version)), wait_s=60.0)
        if record["state"] != "live":
            raise RuntimeError(f"version {version} is {record['state']}: {record['report']}")


def wasted(database: Path) -> int:
    """Return the sampled tokens of episodes and groups that were dropped or aborted."""
    with sqlite3.connect(database) as connection:
        tokens = dict(
            connection.execute("SELECT episode_id, sum(completion_tokens) FROM calls GROUP BY episode_id")
        )
        group_of = dict(connection.execute("SELECT id, group_id FROM episodes"))
        kinds = defaultdict(set)
        for kind, group_id, episode_id in connection.execute(
            "SELECT kind, group_id, episode_id FROM decisions"
        ):
            kinds[kind].add(episode_id or group_id)
    ended = set().union(*(kinds[kind] for kind in _WASTED))
    return sum(tokens.get(episode, 0) for episode, group in group_of.items() if {episode, group} & ended)
