"""`scheduler run` on one machine: real processes, a real gateway, fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.harness.scheduler_process import KEY, UP_S, RunningCluster, run_forked, run_to_end, trainer
from tests.harness.waiting import result_of, until
from tests.harness.weights import fake_weights, publish


async def test_everything_is_started_tended_and_ended(tiny_model: Path, tmp_path: Path) -> None:
    nodes = '[nodes.a]\ntags = ["rollout"]\n[nodes.b]\ntags = ["rollout", "train"]\n'
    async with run_forked(tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 2)) as cluster:
        before = await cluster.until_open("a-0", "b-0")
        assert isinstance(await cluster.chat(), str)
        await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 2, "both ranks run", UP_S)
        ranks = {path.name[5]: path.read_text() for path in tmp_path.glob("rank-*.json")}
        assert ranks.keys() == {"0", "1"}
        assert '"WORLD_SIZE": "2"' in ranks["1"]
        assert '"MASTER_ADDR": "127.0.0.1"' in ranks["1"]
        assert '"HEADGATE_TRAIN_NODES": "b"' in ranks["0"]
        assert KEY in ranks["0"], "a trainer calls the admin API"

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
        assert again == after, "engines outlive the gateway, and the next one knows them"

        assert await cluster.stop() == 0
        assert cluster.processes() == {}
        assert "is up" in cluster.output
        assert "stopping" in cluster.output
        assert KEY not in cluster.output + cluster.tails()


async def test_the_end_of_the_trainer_is_the_end_and_one_rank_ends_all(
    tiny_model: Path, tmp_path: Path
) -> None:
    nodes = '[nodes.one]\ntags = ["rollout", "train"]\n'
    async with run_forked(tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 2)) as cluster:
        await cluster.until_open("one-0")
        await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 2, "both ranks run", UP_S)
        first = {path.name for path in tmp_path.glob("rank-*.json")}
        pid = int(next(name for name in first if name.startswith("rank-1")).split("-")[2].split(".")[0])
        os.kill(pid, signal.SIGKILL)
        await until(
            lambda: len(list(tmp_path.glob("rank-*.json"))) == 4, "both ranks are started again", UP_S
        )
        tmp_path.joinpath("done").touch()
        await until(lambda: cluster.process.returncode is not None, "it ends", UP_S)
        assert cluster.process.returncode == 0
        assert "the trainer has ended" in cluster.output
        assert cluster.processes() == {}


async def test_an_engine_that_never_comes_up_is_given_up_within_its_budget(
    tiny_model: Path, tmp_path: Path
) -> None:
    cluster = (
        "[cluster]\nrestarts = 2\n[engine]\n"
        f'command = ["{sys.executable}", "-c", "raise SystemExit(3)"]\n[nodes.a]\ntags = ["rollout"]\n'
    )
    status, output = await run_to_end(tmp_path, tiny_model, cluster)
    assert status == 1
    assert output.count("a-0 ended with 3") == 2
    assert "a-0 is given up after 2 restarts" in output
    assert "all engines failed permanently" in output


async def test_check_shows_places_and_starts_nothing(tiny_model: Path, tmp_path: Path) -> None:
    nodes = '[nodes.a]\ntags = ["rollout"]\nengines = 3\n[nodes.b]\ntags = ["train"]\n'
    status, output = await run_to_end(
        tmp_path, tiny_model, "[cluster]\n" + nodes + trainer(tmp_path, 1), "--check"
    )
    assert status == 0
    assert "3 engines" in output
    assert "trainer rank 0" in output
    assert not tmp_path.joinpath("logs").exists()
    unsatisfied = '[cluster]\n[nodes.a]\ntags = ["rollout"]\n' + trainer(tmp_path, 1)
    status, output = await run_to_end(tmp_path, tiny_model, unsatisfied, "--check")
    assert status == 2
    assert "no node can run the trainer: no node has the tag train" in output


class Steps:
    """This test is the trainer and its agent: it reports how long it was busy, whatever that took."""

    def __init__(self, cluster: RunningCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._weights = fake_weights(folder / "weights", "some")
        self._version = 0

    async def step(self, busy_s: float, call: str = "") -> None:
        """Train a batch, which `scheduler run` has seen the end of. The trainer reports once `call` is in the spare engine."""
        admin, version = self._cluster.admin, self._version
        path = publish(self._weights, self._folder / f"v{version + 1}", version + 1, version)
        opened = await admin.open_episode("task", group_size=1, wait_s=UP_S)
        await self._cluster.chat_of(opened, max_tokens=1)
        await admin.reward(opened.episode_id, 1.0)
        lease = await admin.lease("test")
        assert (await admin.leased_groups(lease, 0, wait_s=UP_S)).complete
        assert (await admin.publish(version + 1, str(path), wait_s=UP_S))["state"] == "live"
        await admin.ack(lease, "none")
        if call:
            await admin.move_call(call, "spare-0")
            await self._cluster.until_in(call, "spare-0")
        await admin.release("t", busy_s=busy_s)
        await self._cluster.until_looked("t", ["train"])
        self._version += 1


@pytest.mark.long  # unit/scheduler/cluster/test_supervisor.py shows the same without processes
async def test_a_spare_node_is_used_given_back_and_used_again_by_the_reports_of_the_trainer(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The call that runs there when the node is given back goes on elsewhere from its last token."""
    nodes = '[nodes.a]\ntags = ["rollout"]\n[nodes.spare]\ntags = ["rollout"]\nspare = true\n'
    nodes += '[nodes.t]\ntags = ["train"]\n[elastic]\nsteps = 1\n' + trainer(tmp_path, 1, claims="true")
    async with run_forked(tmp_path, tiny_model, "[cluster]\n" + nodes) as cluster:
        await cluster.until_open("a-0")
        await cluster.until_looked("t", ["train"])
        steps = Steps(cluster, tmp_path)
        await steps.step(busy_s=1e-6)  # its begin was not reported
        await steps.step(busy_s=1e-6)
        engines = await cluster.until_open("a-0", "spare-0")
        assert cluster.output.count("one more rollout node") == 1
        await cluster.until_looked("t", ["train"])

        pid = cluster.engine_pid(engines["spare-0"])
        for url in engines.values():
            await cluster.fake(url, endless=True, hold_after=1)
        opened = await cluster.admin.open_episode("task", mode="eval")
        call_task = asyncio.create_task(cluster.usage_of(opened, max_tokens=40), name="call")
        await until(cluster.has_calls, "the call runs", UP_S)
        (call,) = await cluster.admin.calls()
        await steps.step(busy_s=1e6, call=call["call_id"])
        await cluster.until_in(call["call_id"], "a-0")
        await cluster.until_open("a-0")
        await until(lambda: "spare left" in cluster.output, "its node is spare again", UP_S)
        await until(lambda: not os.path.exists(f"/proc/{pid}"), "its process is gone", UP_S)
        await until(lambda: cluster.has_nodes("a", "t"), "the gateway knows it no more", UP_S)
        await cluster.fake(engines["a-0"], endless=True, hold_after=None)
        assert (await result_of(call_task, "the call ends", UP_S))["completion_tokens"] == 40
        assert cluster.output.count("spare is given back") == 1

        await cluster.until_looked("t", ["train"])
        await steps.step(busy_s=1e-6)
        await steps.step(busy_s=1e-6)
        await cluster.until_open("a-0", "spare-0")
        assert await cluster.stop() == 0


async def test_a_node_switches_to_training_and_back_by_the_reports_of_the_trainer(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The trainer starts again with a rank there; before and after, the node is not claimed, so it samples all the time."""
    nodes = (
        '[nodes.a]\ntags = ["rollout"]\n[nodes.b]\ntags = ["rollout", "train"]\n[nodes.t]\ntags = ["train"]\n'
    )
    nodes += "[elastic]\nsteps = 1\nranks = 2\n" + trainer(tmp_path, 1, claims="true")

    def started(pattern: str) -> list[str]:
        return [path.read_text() for path in sorted(tmp_path.glob(pattern))]

    async with run_forked(tmp_path, tiny_model, "[cluster]\n" + nodes) as cluster:
        await cluster.until_open("a-0", "b-0")
        await cluster.until_looked("t", ["train"])
        assert (await cluster.admin.node("b"))["tags"] == ["rollout"]
        await until(lambda: len(started("rank-*.json")) == 1, "the rank runs", UP_S)
        steps = Steps(cluster, tmp_path)
        await steps.step(busy_s=1e6)  # its begin was not reported
        await steps.step(busy_s=1e6)
        await until(lambda: len(started("rank-*.json")) == 3, "both ranks run", UP_S)
        (second,) = started("rank-1-*.json")
        assert '"WORLD_SIZE": "2"' in second
        assert '"HEADGATE_TRAIN_NODES": "t,b"' in second
        assert cluster.output.count("the trainer goes on with 2 ranks in place of 1") == 1
        await cluster.until_looked("b", ["rollout", "train"])

        await steps.step(busy_s=1e-6)
        await steps.step(busy_s=1e-6)
        await until(lambda: len(started("rank-*.json")) == 4, "one rank runs", UP_S)
        await cluster.until_looked("b", ["rollout"])
        await cluster.until_open("a-0", "b-0")
        assert cluster.output.count("the trainer goes on with 1 rank in place of 2") == 1
        assert "is started again" not in cluster.output, "it counts as no restart"
        assert await cluster.stop() == 0
