"""The TRL example on an engine that computes from the weights: it trains the recorded tokens, also when it is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from headgate.types import Episode
from tests.harness.fences import ROOT
from tests.harness.gateways import RunningGateway, run_gateway, serve, settings_for
from tests.harness.model_engine import ModelEngine
from tests.harness.models import save_model
from tests.harness.waiting import until

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.timeout(1800)]

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
GROUPS, GROUP_SIZE, STEPS = 2, 4, 3
LONG_S = 900.0


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
        async with run_gateway(values, in_process=False) as gateway:
            agents = asyncio.create_task(run_agents(gateway), name="agents")
            yield gateway
            agents.cancel()
            await asyncio.wait({agents})


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
    async with AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
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


async def start(gateway: RunningGateway, work: Path) -> asyncio.subprocess.Process:
    sizes = ("--groups", str(GROUPS), "--group-size", str(GROUP_SIZE), "--lr", "1e-2", "--steps", str(STEPS))
    return await asyncio.create_subprocess_exec(
        *(
            str(PYTHON),
            "-m",
            "tests.harness.trl_recorder",
            str(work),
            gateway.url,
            str(work / "versions"),
            *sizes,
        ),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"},
        stdout=sys.stderr,
    )


async def test_trl_trains_what_was_recorded_once_although_it_is_killed(tmp_path: Path) -> None:
    assert PYTHON.exists(), "make trl makes .venv-trl"
    async with fed(tmp_path) as gateway:
        killed = await start(gateway, tmp_path)

        async def trains_batch_1() -> bool:
            assert killed.returncode is None
            return bool(list(tmp_path.glob("batch-1-*.npz")))

        await until(trains_batch_1, "batch 1 is trained", LONG_S)
        killed.kill()
        await killed.wait()
        assert (await gateway.admin.status())["version"] == 1
        again = await start(gateway, tmp_path)
        assert await again.wait() == 0
        status = await gateway.admin.status()
        assert (status["version"], status["consumed"]) == (STEPS, STEPS)
        records = [await gateway.admin.weights(version) for version in range(1, STEPS + 1)]
        assert [record["report"][0]["probe"]["verdict"] for record in records] == ["passed"] * STEPS
        assert [batch["batch"] for batch in await gateway.admin.batches()] == list(range(STEPS))
        groups = [await gateway.admin.batch_groups(batch) for batch in range(STEPS)]
    names = [group.group_id for batch in groups for group in batch]
    assert len(set(names)) == len(names) == GROUPS * STEPS
    files = {batch: sorted(tmp_path.glob(f"batch-{batch}-*.npz")) for batch in range(STEPS)}
    given = [len(found) for found in files.values()]
    assert given == [1, 2, 1], "only the batch without a version is given again"
    for batch, found in files.items():
        expected = sorted(
            recorded(episode) for group in groups[batch] for episode in group.episodes if episode.nodes
        )
        for file in found:
            assert sorted(trained(np.load(file))) == expected
    assert any(len(group.episodes) < GROUP_SIZE for batch in groups for group in batch), "none was padded"
    first, *stale = (ratios(np.load(found[-1])) for found in files.values())
    assert np.abs(first - 1).max() < 1e-3
    assert max(np.abs(ratio - 1).max() for ratio in stale) > 0.01, "tokens of the version before are weighed"


Tokens = tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]


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


def trained(output: Any) -> list[Tokens]:
    """Return the same of the rows of which TRL trains something."""
    found = []
    for row in range(len(output["prompt_ids"])):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row] > 0]
        real = output["completion_mask"][row] > 0
        mask = output["tool_mask"][row][real] > 0
        if mask.any():
            ids = (*prompt.tolist(), *output["completion_ids"][row][real].tolist())
            logprobs = output["sampling_per_token_logps"][row][real][mask]
            found.append((ids, (*[False] * len(prompt), *mask.tolist()), tuple(logprobs.tolist())))
    return found


def ratios(output: Any) -> Any:
    return output["importance_sampling_ratio"][(output["completion_mask"] * output["tool_mask"]) > 0]
