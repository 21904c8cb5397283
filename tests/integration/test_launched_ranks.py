"""torchrun and `scheduler run` start two ranks again whichever is killed, and the run learns what an uninterrupted one learns.

All programs are started as they are for a user. `make test` has both halves: `scheduler run` restarts ranks that do nothing
(test_scheduler_run.py), and killed ranks learn what an uninterrupted run learns (test_trainer_killed.py).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from headgate.client import GatewayClient, GatewayUnreachable
from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.killed_ranks import Victim, happened, planned
from tests.harness.killed_runs import TRAINER, straight_on_two, world
from tests.harness.ranks import on_ranks
from tests.harness.scheduler_process import KEY, RunningCluster, run_cluster
from tests.harness.waiting import result_of, until
from tests.unit.trainer.rollouts import episodes
from trainer.config.settings import Settings

LIMIT_S = 600.0
FIRST: tuple[Victim, ...] = ((0, "some groups accumulated"), (1, "writing shards"), (0, "publishing"))
SECOND: tuple[Victim, ...] = ((1, "gradient whole"), (0, "checkpoint not renamed"), (1, "gathered"))
"""In a step, at the checkpoint and at publishing: between them, either rank at each. Each life costs two imports of torch."""

pytestmark = [pytest.mark.long, pytest.mark.parametrize("victims", [FIRST, SECOND])]


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def write_config(work: Path, model: Path, url: str, steps: int) -> Path:
    """The trainer's file; all that it publishes is kept."""
    config = work / "trainer.toml"
    names = {"work": work, "steps": steps, "url": url, "model": model, "every": 1}
    config.write_text(TRAINER.format(**names) + "[publish]\nkeep = 100\n")
    return config


async def batches_of(admin: GatewayClient, steps: int) -> list[Any]:
    """The recorded batches of a run, all of whose versions are of one line."""
    status = await admin.status()
    assert (status["version"], status["consumed"], status["orphaned_versions"]) == (steps, steps, [])
    return [await admin.batch_groups(batch) for batch in range(steps)]


async def check_weights(config: Path, batches: Sequence[Any]) -> None:
    """Every version has the files and the probe that it has in an uninterrupted run on the recorded batches."""
    settings = Settings.load(config)
    straight, _ = await asyncio.to_thread(
        on_ranks, 2, straight_on_two, settings, config.parent / "straight", batches
    )
    assert len(straight) == settings.run.steps
    for version, expected in enumerate(straight, start=1):
        manifest = json.loads((settings.run.dir / f"weights/v{version:06d}/manifest.json").read_text())
        assert (manifest["files"], manifest["probe"]) == expected, version


async def test_torchrun_starts_killed_ranks_again(
    tiny_model: Path, tmp_path: Path, victims: tuple[Victim, ...]
) -> None:
    steps, log = len(victims) + 1, tmp_path / "torchrun.log"
    environ = planned(tmp_path / "plan", victims)
    async with world(tiny_model, tmp_path) as (gateway, _):
        config = write_config(tmp_path, tiny_model, gateway.url, steps)
        argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "--max-restarts", str(len(victims))),
            *("-m", "trainer.cli", "run", str(config)),
        ]
        process = await LocalProcess.start("torchrun", argv, log, environ)
        try:
            status = await result_of(process.wait(), "torchrun ends", LIMIT_S)
        finally:
            await process.stop(10.0)
        assert status == 0, log.read_text()[-5000:]
        batches = await batches_of(gateway.admin, steps)
    assert happened(tmp_path / "plan") == [*victims]
    await check_weights(config, batches)


@asynccontextmanager
async def its_gateway(cluster: RunningCluster, environ: Mapping[str, str]) -> AsyncIterator[None]:
    """The gateway of a cluster that has ended, on the same store."""
    argv = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(cluster.folder / "gateway.toml")]
    log = cluster.folder / "gateway.log"
    process = await LocalProcess.start("gateway", argv, log, {**environ, "HEADGATE_ADMIN_KEY": KEY})

    async def responses() -> bool:
        try:
            return bool(await cluster.admin.status())
        except (GatewayUnreachable, httpx.TransportError):
            assert process.returncode is None, log.read_text()
            return False

    try:
        await until(responses, "the gateway answers")
        yield
    finally:
        await process.stop(10.0)


async def test_scheduler_run_starts_killed_ranks_again(
    tiny_model: Path, tmp_path: Path, victims: tuple[Victim, ...]
) -> None:
    steps, port = len(victims) + 1, free_port()
    config = write_config(tmp_path, tiny_model, f"http://127.0.0.1:{port}", steps)
    engine = f'["{{python}}", "-m", "tests.harness.killed_runs", "{tiny_model}", "{{port}}"]'
    cluster = (
        f'[cluster]\n[nodes.a]\ntags = ["rollout"]\n[nodes.b]\ntags = ["train"]\n[engine]\ncommand = {engine}\n'
        f'[trainer]\nconfig = "{config}"\nranks = 2\n'
    )
    environ = planned(tmp_path / "plan", victims)
    async with run_cluster(tmp_path, tiny_model, cluster, environ, port) as running:
        await running.until_open("a-0")
        async with episodes(running, open_wait_s=20.0):
            status = await result_of(running.process.wait(), "the trainer is done", LIMIT_S)
        assert status == 0, running.output + running.tails()
        async with its_gateway(running, environ):
            batches = await batches_of(running.admin, steps)
    assert happened(tmp_path / "plan") == [*victims]
    await check_weights(config, batches)
