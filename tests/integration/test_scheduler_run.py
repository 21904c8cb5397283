"""`scheduler run` on one machine: real processes, a real gateway, fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from tests.harness.scheduler_process import KEY, UP_S, run_cluster, run_to_end, trainer
from tests.harness.waiting import until
from tests.harness.weights import fake_weights, publish


async def test_everything_is_started_tended_and_ended(tiny_model: Path, tmp_path: Path) -> None:
    nodes = '[nodes.a]\ntags = ["rollout"]\n[nodes.b]\ntags = ["rollout", "train"]\n'
    async with run_cluster(tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 2)) as cluster:
        before = await cluster.until_open("a-0", "b-0")
        assert isinstance(await cluster.chat(), str)
        await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 2, "both ranks run", UP_S)
        told = {path.name[5]: path.read_text() for path in tmp_path.glob("rank-*.json")}
        assert told.keys() == {"0", "1"}
        assert '"WORLD_SIZE": "2"' in told["1"]
        assert '"MASTER_ADDR": "127.0.0.1"' in told["1"]
        assert '"HEADGATE_TRAIN_NODES": "b"' in told["0"]
        assert KEY in told["0"], "a trainer speaks to the admin API"

        pid = cluster.engine_pid(before["a-0"])
        secrets = [line for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if KEY in line]
        assert not secrets, "an engine has no business with keys"
        assert not [line for line in cluster.processes().values() if KEY in line], "nor has ps"
        os.kill(pid, signal.SIGKILL)
        await cluster.until_elsewhere("a-0", before["a-0"])
        after = await cluster.until_open("a-0", "b-0")
        assert after["b-0"] == before["b-0"]
        assert isinstance(await cluster.chat(), str)

        gateway = next(p for p, line in cluster.processes().items() if "gateway.cli serve" in line)
        os.kill(gateway, signal.SIGKILL)
        await until(lambda: not os.path.exists(f"/proc/{gateway}"), "the gateway is gone", UP_S)
        again = await cluster.until_open("a-0", "b-0")
        assert again == after, "engines outlive the gateway, and the next one is told of them"

        assert await cluster.stop() == 0
        assert cluster.processes() == {}
        assert "is up" in cluster.said
        assert "stopping" in cluster.said
        assert KEY not in cluster.said + cluster.tails()


async def test_the_end_of_the_trainer_is_the_end_and_one_rank_ends_all(
    tiny_model: Path, tmp_path: Path
) -> None:
    nodes = '[nodes.one]\ntags = ["rollout", "train"]\n'
    async with run_cluster(tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 2)) as cluster:
        await cluster.until_open("one-0")
        await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 2, "both ranks run", UP_S)
        first = {path.name for path in tmp_path.glob("rank-*.json")}
        pid = int(next(name for name in first if name.startswith("rank-1")).split("-")[2].split(".")[0])
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 4, "both ranks are started anew", UP_S)
        tmp_path.joinpath("done").touch()
        await until(lambda: cluster.process.returncode is not None, "it ends", UP_S)
        assert cluster.process.returncode == 0
        assert "the trainer is done" in cluster.said
        assert cluster.processes() == {}


async def test_an_engine_that_never_comes_up_is_given_up_within_its_budget(
    tiny_model: Path, tmp_path: Path
) -> None:
    cluster = (
        "[cluster]\nrestarts = 2\n[engine]\n"
        f'command = ["{sys.executable}", "-c", "raise SystemExit(3)"]\n[nodes.a]\ntags = ["rollout"]\n'
    )
    status, said = await run_to_end(tmp_path, tiny_model, cluster)
    assert status == 1
    assert said.count("a-0 ended with 3") == 2
    assert "a-0 is given up after 2 restarts" in said
    assert "every engine is given up" in said


async def test_check_shows_places_and_starts_nothing(tiny_model: Path, tmp_path: Path) -> None:
    nodes = '[nodes.a]\ntags = ["rollout"]\nengines = 3\n[nodes.b]\ntags = ["train"]\n'
    status, said = await run_to_end(
        tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 1), "--check"
    )
    assert status == 0
    assert "3 engines" in said
    assert "trainer rank 0" in said
    assert not tmp_path.joinpath("logs").exists()
    unsatisfied = '[cluster]\n[nodes.a]\ntags = ["rollout"]\n' + trainer(tmp_path, 1)
    status, said = await run_to_end(tmp_path, tiny_model, unsatisfied, "--check")
    assert status == 2
    assert "there is no place for the trainer: no node has the tag train" in said


async def test_a_spare_node_is_used_once_generation_is_the_bottleneck(
    tiny_model: Path, tmp_path: Path
) -> None:
    """This test is trainer and agent; it trains in no time, so that generation is the bottleneck."""
    nodes = '[nodes.a]\ntags = ["rollout"]\n[nodes.spare]\ntags = ["rollout"]\nspare = true\n[elastic]\nsteps = 1\n'
    weights = fake_weights(tmp_path / "weights", "some")
    async with run_cluster(tmp_path, tiny_model, "[cluster]\n" + nodes) as cluster:
        await cluster.until_open("a-0")
        trained_s = 0.0
        for version in range(40):
            if "spare joined" in cluster.said:
                break
            path = publish(weights, tmp_path / f"v{version + 1}", version + 1, version)
            # A generation that is longer than a look, and than a training; if it was not, there is the next
            await asyncio.sleep(0.5 + 2 * trained_s)
            opened = await cluster.admin.open_episode("task", group_size=1, wait_s=UP_S)
            await cluster.chat_of(opened)
            await cluster.admin.reward(opened.episode_id, 1.0)
            rewarded_at = time.monotonic()
            lease = await cluster.admin.lease("test")
            groups = await cluster.admin.leased_groups(lease, 0, wait_s=UP_S)
            assert groups.complete
            record = await cluster.admin.publish(version + 1, str(path), wait_s=UP_S)
            assert record["state"] == "live"
            trained_s = time.monotonic() - rewarded_at
            await cluster.admin.ack(lease, "none")
        assert "one more rollout node" in cluster.said
        await cluster.until_open("a-0", "spare-0")
        assert await cluster.stop() == 0
