"""Another trainer behind a gateway whose agents never end: it trains what was recorded, once, although it is killed.

The trainer's process writes what it trains: a file `batch-NUMBER-PROCESS` for each batch, before its step.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI

from gateway.engines.fake import create_fake_app
from headgate.client import Row, rows_of
from headgate.processes.ports import free_port
from headgate.types import Episode
from tests.harness.fences import ROOT
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.model_engine import ModelEngine
from tests.harness.models import save_model
from tests.harness.waiting import until

GROUPS, GROUP_SIZE, STEPS = 2, 4, 3
LONG_S = 900.0

Tokens = tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Trained:
    """What a trainer trains in one batch."""

    rows: list[Tokens]
    """Of which something is trained."""
    ratios: Any
    """Of each trained token: the probability by the trainer's weights before the step, over the recorded one."""
    rewards: list[float] | None = None
    """Of `rows`, where the trainer's form has them: such a trainer trains every path, the other the newest of an episode."""


async def check_recorded_tokens_are_trained_once_although_killed(
    work: Path,
    command: Callable[[RunningGateway], Sequence[str]],
    read: Callable[[Path], Trained],
    tolerance: float = 1e-3,
) -> None:
    """Train `STEPS` versions, with a kill after batch 1 was computed, and compare with the gateway's record.

    `tolerance`: by which ratios may differ from 1 where no token is stale, since a trainer rounds otherwise than the engine.
    """
    async with fed(work) as gateway:
        async with running(command(gateway)) as killed:

            async def trains_batch_1() -> bool:
                assert killed.returncode is None
                return bool(files_of(work, 1))

            await until(trains_batch_1, "batch 1 is trained", LONG_S)
        assert (await gateway.admin.status())["version"] == 1
        async with running(command(gateway)) as again:
            assert await again.wait() == 0
        status = await gateway.admin.status()
        assert (status["version"], status["consumed"]) == (STEPS, STEPS)
        records = [await gateway.admin.weights(version) for version in range(1, STEPS + 1)]
        assert [record["report"][0]["probe"]["verdict"] for record in records] == ["passed"] * STEPS
        assert [batch["batch"] for batch in await gateway.admin.batches()] == list(range(STEPS))
        groups = [await gateway.admin.batch_groups(batch) for batch in range(STEPS)]
    names = [group.group_id for batch in groups for group in batch]
    assert len(set(names)) == len(names) == GROUPS * STEPS
    found = [[read(file) for file in files_of(work, batch)] for batch in range(STEPS)]
    assert [len(given) for given in found] == [1, 2, 1], "only the batch without a version is given again"
    for batch, given in zip(groups, found, strict=True):
        newest = [(recorded(e), e.reward) for group in batch for e in group.episodes if e.nodes]
        every = [(of_row(row), row.reward) for row in rows_of(batch) if row.train.any()]
        for one in given:
            expected = sorted(newest if one.rewards is None else every)
            assert sorted(one.rows) == [tokens for tokens, _ in expected]
            if one.rewards is not None:
                rewards = [reward for _, reward in sorted(zip(one.rows, one.rewards, strict=True))]
                np.testing.assert_allclose(rewards, [reward for _, reward in expected], rtol=1e-6)
    assert any(len(group.episodes) < GROUP_SIZE for batch in groups for group in batch), "none was short"
    first, *stale = (given[-1].ratios for given in found)
    assert np.abs(first - 1).max() < tolerance
    assert max(np.abs(ratio - 1).max() for ratio in stale) > 10 * tolerance, (
        "tokens of the version before are weighed"
    )


def of_row(row: Row) -> Tokens:
    return tuple(row.ids.tolist()), tuple(row.train.tolist()), tuple(row.logprobs[row.train].tolist())


def files_of(work: Path, batch: int) -> list[Path]:
    return sorted(file for file in work.glob(f"batch-{batch}-*") if ".part" not in file.name)


@asynccontextmanager
async def running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a trainer, and kill it at the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=sys.stderr)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def fed(work: Path) -> AsyncIterator[RunningGateway]:
    """Yield a gateway with agents that never end; every third group loses a member."""
    save_model(work / "model", 0, tied=True)
    port = free_port()
    async with serve(create_fake_app(ModelEngine(str(work / "model"))), port):
        values = settings_for(
            work / "model",
            work,
            engine={"launch": "external", "url": f"http://127.0.0.1:{port}"},
            staleness={"batch": GROUPS, "eta": 1, "min_members": 2},
        )
        async with run_gateway(values, in_process=False) as gateway, asyncio.TaskGroup() as group:
            agents = group.create_task(run_agents(gateway), name="agents")
            yield gateway
            agents.cancel()


async def run_agents(gateway: RunningGateway) -> None:
    for number in itertools.count():
        async with asyncio.TaskGroup() as group:
            for member in range(GROUP_SIZE):
                group.create_task(attempt(gateway, number, member), name=f"agent {number}.{member}")


async def attempt(gateway: RunningGateway, number: int, member: int) -> None:
    """Take two turns with the SDK; the reward is of the replies."""
    opened = await gateway.admin.open_episode(
        f"task-{number}",
        f"group-{number}",
        GROUP_SIZE,
        wait_s=LONG_S,
        idempotency_key=f"{number:08}-{member:08}",
    )
    if number % 3 == 1 and member == 0:
        await gateway.admin.abandon(opened.episode_id, "crashed")
        return
    async with AsyncOpenAI(
        base_url=opened.base_url, api_key=opened.api_key, max_retries=0, timeout=LONG_S
    ) as client:
        messages: list[Any] = [{"role": "user", "content": f"task {number}"}]
        text = ""
        for turn in range(2):
            reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=8)
            text += reply.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": reply.choices[0].message.content or ""},
                {"role": "user", "content": f"and {turn}"},
            ]
    await gateway.admin.reward(opened.episode_id, (sum(map(ord, text)) % 7) / 6)


def recorded(episode: Episode) -> Tokens:
    """Return the tokens that the newest call saw and sampled, which of them were sampled, and their log-probabilities."""
    ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    node, length = episode.nodes[-1], len(episode.nodes[-1].ids)
    while True:
        ids = node.ids[:length].tolist() + ids
        sampled = [node.sampled] * length + sampled
        logprobs = node.logprobs[:length].tolist() + logprobs
        if node.parent < 0:
            return tuple(ids), tuple(sampled), tuple(logprobs)
        node, length = episode.nodes[node.parent], node.at


def read_trained(file: Path) -> Trained:
    """Return what `write_trained` wrote."""
    rows, rewards, ratios = [], [], []
    for prompt, rest, mask, logprobs, reward, ratio in json.loads(file.read_text()):
        train = np.array(mask, bool)
        if train.any():
            rows.append(
                (
                    (*prompt, *rest),
                    (*[False] * len(prompt), *train.tolist()),
                    tuple(np.array(logprobs)[train].tolist()),
                )
            )
            rewards.append(sum(reward))
            ratios += np.array(ratio)[train].tolist()
    return Trained(rows, np.array(ratios), rewards)
