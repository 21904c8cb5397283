"""The clusters of examples/clusters as they are, but for the port: fake engines, headgate's trainer and its agent.

What kills their processes, and what must be right afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from tests.harness.records import check_sampled_by_the_fake
from tests.harness.scheduler_process import UP_S, RunningCluster
from tests.harness.waiting import result_of, until

ROOT = Path(__file__).parents[2]
RUN = Path("runs/cluster/trainer")
BATCH = 4


@asynccontextmanager
async def example(
    name: str, model: Path, folder: Path, env: Mapping[str, str] | None = None, ray: str = "auto"
) -> AsyncIterator[RunningCluster]:
    """Run a file of examples/clusters in `folder`, which is the working directory, as its paths are relative.

    `ray`: the address of the Ray cluster.
    """
    port = free_port()
    shutil.copytree(ROOT / "examples" / "clusters", "examples/clusters")
    for file in ("gateway.toml", "trainer.toml"):
        path = Path("examples/clusters", file)
        path.write_text(path.read_text().replace("8000", str(port)))
    cluster_file = Path(f"examples/clusters/{name}.toml")
    cluster_file.write_text(cluster_file.read_text().replace('"auto"', f'"{ray}"'))
    shutil.copytree(model, "runs/cluster/model")
    argv = [sys.executable, "-m", "scheduler.cli", "run", str(cluster_file)]
    environment = {"CLUSTER_TEST_FOLDER": str(folder), "PYTHONPATH": str(ROOT), **(env or {})}
    process = await LocalProcess.start("scheduler run", argv, folder / "run.log", environment)
    cluster = RunningCluster(process, f"http://127.0.0.1:{port}", folder)
    try:
        yield cluster
    finally:
        await cluster.admin.close()
        await process.stop(30.0)


async def until_trained(cluster: RunningCluster, more: int) -> int:
    """Wait until `more` versions are live than now are written. Return the newest."""
    due = written() + more

    async def live() -> bool:
        assert cluster.process.returncode is None, cluster.output
        keep_versions()
        return await cluster.version() >= due

    await until(live, f"version {due} is live", UP_S)
    return due


def written() -> int:
    """Return the newest version that the trainer wrote."""
    return max((int(path.name[1:]) for path in RUN.glob("weights/v*")), default=0)


def keep_versions() -> None:
    """Keep the versions that are written, as the trainer removes old ones."""
    for path in RUN.glob("weights/v*"):
        if path.joinpath("manifest.json").exists() and not Path("kept", path.name).exists():
            with suppress(FileNotFoundError):
                shutil.copytree(path, Path("kept", path.name), copy_function=os.link)


def kill(cluster: RunningCluster, command: str) -> None:
    """Kill the first process of a command with SIGKILL."""
    found = [pid for pid, line in cluster.processes().items() if command in line]
    assert found, cluster.processes()
    os.kill(min(found), signal.SIGKILL)


async def kill_an_open_engine(cluster: RunningCluster) -> str:
    """Kill an engine with SIGKILL once one is open: those of nodes with both tags take turns. Return its name."""
    engines: dict[str, str] = {}

    async def is_open() -> bool:
        engines.update(await cluster.engines())
        return bool(engines)

    await until(is_open, "an engine is open")
    name, url = engines.popitem()
    os.kill(cluster.engine_pid(url), signal.SIGKILL)
    return name


async def check_account(cluster: RunningCluster) -> None:
    """Each version was made of the one before and of one batch, no group is in two, and each token is its version's."""
    status = await cluster.admin.status()
    assert status["orphaned_versions"] == []
    assert abs(status["consumed"] - status["version"]) <= 1, (
        "a batch's acknowledgment or its version is on its way"
    )
    parents = [(await cluster.admin.weights(v))["parent"] for v in range(1, status["version"] + 1)]
    assert parents == list(range(status["version"]))
    steps = [json.loads(line)["batch"] for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, count in Counter(steps).items() if count > 1] == []
    groups = [g for batch in range(status["consumed"]) for g in await cluster.admin.batch_groups(batch)]
    trained = [group.group_id for group in groups]
    assert len(trained) == len({*trained}) == BATCH * status["consumed"]
    weights = {int(path.name[1:]): path.resolve() for path in Path("kept").iterdir()}
    checked = 0
    for episode in (episode for group in groups for episode in group.episodes):
        nodes = (await cluster.admin.trajectory(episode.episode_id))["nodes"]
        for turn in (node for node in nodes if node["sampled"]):
            if all({*span[:1], *span[2:]} <= weights.keys() for span in turn["versions"]):
                check_sampled_by_the_fake(nodes, turn, weights, unsure=True)
                checked += 1
    assert checked > len(groups), "most versions were kept"


async def train_through_every_death(cluster: RunningCluster) -> None:
    """Kill an engine, the trainer and the gateway in turn, the gateway with a version on its way, and check the account."""
    await until_trained(cluster, 3)
    name = await kill_an_open_engine(cluster)
    await until(lambda: f"{name} ended with -9" in cluster.output, "the engine's end is seen")
    await until_trained(cluster, 2)
    kill(cluster, "trainer.cli run")
    await until(lambda: cluster.output.count("trainer ended with -9") == 1, "the trainer's end is seen")
    await until_trained(cluster, 2)
    before = written()
    await until(lambda: written() > before, "a version is on its way", every_s=0.001)
    kill(cluster, "gateway.cli serve")
    await until(lambda: "gateway ended with -9" in cluster.output, "the gateway's end is seen")
    await until_trained(cluster, 3)
    assert cluster.output.count("it is started again") == 3, cluster.output
    await check_account(cluster)


async def end_with_ctrl_c(cluster: RunningCluster) -> None:
    """SIGINT ends the cluster with status 0, and no process is left."""
    os.killpg(cluster.process.pid, signal.SIGINT)
    assert await result_of(cluster.process.wait(), "Ctrl-C ends it", UP_S) == 0, cluster.output
    await until(lambda: cluster.processes() == {}, "no process is left")
