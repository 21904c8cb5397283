"""`scheduler run` on Ray: several Ray nodes on this machine (ray.cluster_utils), token authentication on, fake engines.

Needs the extra `ray`. Starting nodes takes a while on a busy machine, so all tests share one cluster, and add nodes of their own.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.extras import install_command
from headgate.processes.child import LocalProcess
from tests.harness.cluster_examples import (
    check_account,
    end_with_ctrl_c,
    example,
    train_through_every_death,
    until_trained,
)
from tests.harness.ray_nodes import RayNodes, node_of, ray_nodes
from tests.harness.scheduler_process import (
    UP_S,
    RunningCluster,
    run_cluster,
    run_to_end,
    trainer,
    write_files,
)
from tests.harness.waiting import until


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A Ray cluster whose head has no labels."""
    if importlib.util.find_spec("ray") is None:
        pytest.fail("these tests need the extra `ray`: pip install -e '.[dev]'")
    with ray_nodes() as started:
        yield started


def environment(nodes: RayNodes, **changed: str) -> dict[str, str]:
    """The environment of a driver of that cluster."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": nodes.token, **changed}


def on_ray(nodes: RayNodes, text: str, wait_s: float = 60.0) -> str:
    """A cluster file for it."""
    return f'[cluster]\nlauncher = "ray"\n[ray]\naddress = "{nodes.address}"\nwait_s = {wait_s}\n{text}'


def engine_nodes(cluster: RunningCluster, engines: dict[str, str]) -> dict[str, str]:
    """Return the Ray node of each engine."""
    return {name: node_of(cluster.engine_pid(url)) for name, url in engines.items()}


@pytest.mark.long
async def test_labels_are_respected_nodes_come_and_die_and_nothing_is_left(
    nodes: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    nodes.add("sampler", rollout="true", zone="a")
    nodes.add("learner", train="true", zone="a")
    text = (
        '[[groups]]\nname = "s"\ntags = ["rollout"]\nzone = "a"\n'
        '[[groups]]\nname = "t"\ntags = ["train"]\nmost = 1\n[engine]\ncpus = 1\n'
        + trainer(tmp_path, 2, cpus="1")
    )
    try:
        async with run_cluster(tmp_path, tiny_model, on_ray(nodes, text), environment(nodes)) as cluster:
            first = await cluster.until_open("s-")
            assert set(engine_nodes(cluster, first).values()) == {"sampler"}
            assert isinstance(await cluster.chat(), str)
            await until(lambda: len(list(tmp_path.glob("rank-*.json"))) == 2, "both ranks run", UP_S)
            pids = [int(path.stem.split("-")[2]) for path in tmp_path.glob("rank-*.json")]
            assert {node_of(pid) for pid in pids} == {"learner"}
            assert nodes.token not in cluster.output + "".join(cluster.processes().values())

            nodes.add("late", rollout="true", zone="a")
            nodes.add("elsewhere", rollout="true", zone="b")
            both = await cluster.until_open("s-", "s-")
            assert set(engine_nodes(cluster, both).values()) == {"sampler", "late"}

            nodes.remove("sampler")
            (name,) = first
            (left,) = await cluster.until_open(*(other for other in both if other != name))
            assert engine_nodes(cluster, {left: both[left]}) == {left: "late"}
            assert isinstance(await cluster.chat(), str)
            assert await cluster.stop() == 0, cluster.output
            await until(lambda: not _ours(cluster), "nothing is left on the nodes", UP_S)
    finally:
        nodes.remove_all()


@pytest.mark.long
async def test_the_example_trains_through_the_death_of_every_process_and_of_a_node(
    nodes: RayNodes, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes.add("sampler", rollout="true")
    nodes.add("learner", rollout="true", train="true")
    try:
        async with example("ray", tiny_model, tmp_path, environment(nodes), nodes.address) as cluster:
            await train_through_every_death(cluster)
            nodes.add("other", rollout="true")
            await until(lambda: " joined" in cluster.output, "the other node is used", UP_S)
            nodes.remove("sampler")
            await until(lambda: " left" in cluster.output, "the node's end is seen", UP_S)
            await until_trained(cluster, 3)
            await check_account(cluster)
            await end_with_ctrl_c(cluster)
    finally:
        nodes.remove_all()


@pytest.mark.long
async def test_a_cluster_that_waits_for_resources_names_their_holder_and_ends_on_a_signal(
    nodes: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    nodes.add("only", rollout="true", zone="f")
    text = '[[groups]]\nname = "g"\ntags = ["rollout"]\nzone = "f"\n[engine]\ncpus = 2\n'
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    try:
        first = on_ray(nodes, text).replace("[cluster]", '[cluster]\nname = "holder"', 1)
        async with run_cluster(folders[0], tiny_model, first, environment(nodes)) as holder:
            await holder.until_open("g-")
            second = on_ray(nodes, text, 3.0)
            async with run_cluster(folders[1], tiny_model, second, environment(nodes)) as waiting:
                await until(
                    lambda: "Ray had no room within 3 s" in waiting.output, "it reports the holder", UP_S
                )
                assert "needs 2 CPU on g-" in waiting.output
                assert "where 0 CPU is free" in waiting.output
                assert "holder: g-" in waiting.output
                assert await waiting.stop() == 0, waiting.output
    finally:
        nodes.remove_all()


async def test_a_tag_that_no_node_has_is_an_error_and_no_hang(
    nodes: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    text = '[[groups]]\nname = "g"\ntags = ["rollout", "tpu"]\n'
    status, output = await run_to_end(tmp_path, tiny_model, on_ray(nodes, text, 1.0), env=environment(nodes))
    assert status == 2
    assert "the group 'g' needs 1 nodes with the labels rollout=true, tpu=true, and has 0" in output
    assert "tpu=true" in output.partition("no node has the label")[2]


@pytest.mark.long  # each driver imports Ray for seconds
async def test_a_driver_without_the_token_or_its_mode_is_refused(
    nodes: RayNodes, tiny_model: Path, tmp_path: Path
) -> None:
    text = on_ray(nodes, '[[groups]]\nname = "g"\ntags = ["rollout"]\n', 1.0)
    status, output = await run_to_end(
        tmp_path, tiny_model, text, "--check", env=environment(nodes, RAY_AUTH_MODE="disabled")
    )
    assert status == 2
    assert "Ray's token authentication is off" in output
    tmp_path.joinpath("check.log").unlink()
    wrong = environment(nodes, RAY_AUTH_TOKEN=secrets.token_hex(32))
    status, output = await run_to_end(tmp_path, tiny_model, text, "--check", env=wrong)
    assert status == 2, output
    assert "no Ray cluster at" in output


async def test_without_ray_one_sentence_names_what_to_install(tiny_model: Path, tmp_path: Path) -> None:
    text = '[cluster]\nlauncher = "ray"\n[[groups]]\nname = "g"\ntags = ["rollout"]\n'
    path, _ = write_files(tmp_path, tiny_model, text)
    code = f"import sys; sys.modules['ray'] = None; sys.argv = ['scheduler', 'run', {str(path)!r}]\n"
    code += "from scheduler.cli import main; main()"
    process = await LocalProcess.start("scheduler", [sys.executable, "-c", code], tmp_path / "run.log")
    assert await process.wait() == 2
    assert process.tail() == f"launcher = 'ray' needs Ray, an extra of headgate: {install_command('ray')}"


def _ours(cluster: RunningCluster) -> dict[int, str]:
    """Return the processes that the cluster started on Ray nodes and that are still there."""
    found = cluster.processes().items()
    return {pid: line for pid, line in found if "gateway.engines" in line or "rank.py" in line}
