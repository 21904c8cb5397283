"""A trainer that is killed with SIGKILL again and again learns what one learns that is never interrupted, to the bit."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headgate.processes.ports import free_port
from tests.harness.gateways import RunningGateway
from tests.harness.killed_runs import BATCH, TRAINER, note_manifest, straight_on_two, world
from tests.harness.ranks import environment, on_ranks
from tests.harness.trainer_process import (
    BESIDE,
    IDLE,
    OFFLOAD,
    OVERLAPPED,
    POINTS,
    RANKS,
    REPLAY,
    Point,
    start,
)
from tests.harness.waiting import until
from trainer.config.settings import Settings
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_trainer import RankTrainer

KNOWN = ("checkpoints", "metrics.jsonl", "run.lock", "samples", "tokens", "trainer-settings.json", "weights")
QUICK = ("checkpoint not renamed", "some groups accumulated")
"""The points of `make test`; `make test-all` has all, with both transports."""
ANYWHERE_S = 0.4
LIMIT_S = 600.0


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


async def run_once(
    config: Path,
    point: Point | None,
    kill_when: Callable[[], Awaitable[None]] | None = None,
    environ: dict[str, str] | None = None,
) -> int | None:
    """One life of the trainer, which ends at a point, when `kill_when` returns, or at the end of the run: how it ended."""
    process = await asyncio.to_thread(start, config, config.with_suffix(".log"), point, environ)
    ended = asyncio.create_task(asyncio.to_thread(process.join, LIMIT_S))
    try:
        if kill_when is not None:
            due = asyncio.create_task(kill_when())
            await asyncio.wait({due, ended}, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            if due.done():
                due.result()
            due.cancel()  # no step was left to make
        await ended
        return process.exitcode
    finally:
        process.kill()


def some_time_after_a_lease(gateway: RunningGateway, chance: random.Random) -> Callable[[], Awaitable[None]]:
    """Return a random while after the trainer has leased a batch."""

    def fence() -> int:
        return (gateway.model.leases.current() or {"fence": 0})["fence"]

    before = fence()

    async def returns() -> None:
        await until(lambda: fence() not in (0, before), "the trainer has leased a batch", LIMIT_S)
        await asyncio.sleep(chance.expovariate(1 / ANYWHERE_S))

    return returns


def newest(directory: Path) -> int:
    """The highest version in a directory of versions; 0 if none."""
    return max((int(d.name[1:]) for d in directory.glob("v*")), default=0)


async def live_through_every_kill(
    config: Path,
    run: Path,
    gateway: RunningGateway,
    noted: dict[str, str],
    names: Sequence[str],
    anywhere: int,
) -> None:
    """Run one life for each point, those of a replay as soon as there is one; some that end anywhere; the last."""
    points, replays = list(names), list(REPLAY)
    chance = random.Random(4)
    while points or replays:
        behind = newest(run / "weights") > newest(run / "checkpoints")
        if not points and not behind:
            break
        name = replays.pop() if behind and replays else points.pop()
        killed = await run_once(config, {**POINTS, **REPLAY}[name])
        assert killed == -signal.SIGKILL, f"{name}: {config.with_suffix('.log').read_text()[-3000:]}"
        for weights in (run / "weights").glob("v*"):
            note_manifest(weights, noted)
    for _ in range(anywhere):
        ended = await run_once(config, None, some_time_after_a_lease(gateway, chance))
        assert ended in (-signal.SIGKILL, 0), config.with_suffix(".log").read_text()[-3000:]
    assert await run_once(config, None) == 0, config.with_suffix(".log").read_text()[-3000:]


HTTP = """
[publish]
transport = "http"
listen = "127.0.0.1:{port}"
delta = true
"""


@pytest.mark.parametrize(
    ("every", "transport", "points", "anywhere"),
    [
        pytest.param(1, "filesystem", tuple(POINTS), 3, marks=pytest.mark.long),
        pytest.param(3, "http", tuple(POINTS), 1, marks=pytest.mark.long),
        pytest.param(3, "http", QUICK, 0),  # and the points of a replay
    ],
)
async def test_a_trainer_that_is_killed_anywhere_learns_what_an_uninterrupted_one_learns(
    tiny_model: Path, tmp_path: Path, every: int, transport: str, points: tuple[str, ...], anywhere: int
) -> None:
    port, steps = free_port(), len(points) + 5
    async with world(tiny_model, tmp_path, f"http://127.0.0.1:{port}") as (gateway, engine):
        config, run = tmp_path / "trainer.toml", tmp_path / "run"
        names = {"work": tmp_path, "steps": steps, "url": gateway.url, "model": tiny_model, "every": every}
        server = HTTP.format(port=port) if transport == "http" else ""
        config.write_text(TRAINER.format(**names) + server)
        await live_through_every_kill(config, run, gateway, engine.given, points, anywhere)
        await check_the_account(gateway, steps)
        batches = [await gateway.admin.batch_groups(batch) for batch in range(steps)]
    for weights in (run / "weights").glob("v*"):
        note_manifest(weights, engine.given)
    contents = {
        json.dumps(json.loads(m)["files"]["model.safetensors"]["tensors"]) for m in engine.given.values()
    }
    assert len(engine.given) == len(contents) == steps, "every step taught something"
    output = config.with_suffix(".log").read_text()
    assert "nothing lost, nothing trained twice" in output or every == 1, "or each was whole in time"
    trained = [group.group_id for batch in batches for group in batch]
    assert len(trained) == len(set(trained)) == steps * BATCH
    await check_final(Settings.load(config), batches, engine.given)


async def check_final(settings: Settings, batches: Sequence[Any], given: dict[str, str]) -> None:
    """Every version and the last checkpoint are what an uninterrupted trainer makes of the recorded batches."""
    last = f"v{settings.run.steps:06d}"
    (tensors,) = (settings.run.dir / "checkpoints" / last / "tensors").iterdir()
    final = {n.removeprefix("weight/"): t for n, t in load_file(tensors).items() if n.startswith("weight/")}
    straight = settings.run.dir.with_name("straight")
    await asyncio.to_thread(check_weights, settings, straight, batches, given, final)


@pytest.mark.parametrize("count", [1, pytest.param(len(BESIDE), marks=pytest.mark.long)])
async def test_a_trainer_that_is_killed_while_a_checkpoint_is_written_loses_nothing(
    tiny_model: Path, tmp_path: Path, count: int
) -> None:
    steps = 2 * count + 3
    async with world(tiny_model, tmp_path) as (gateway, engine):
        config, run = tmp_path / "trainer.toml", tmp_path / "run"
        names = {"work": tmp_path, "steps": steps, "url": gateway.url, "model": tiny_model, "every": 2}
        config.write_text(TRAINER.format(**names))
        for name, point in [*BESIDE.items()][:count]:
            killed = await run_once(config, point)
            assert killed == -signal.SIGKILL, f"{name}: {config.with_suffix('.log').read_text()[-3000:]}"
            assert newest(run / "checkpoints") < newest(run / "weights"), "it was not whole"
        assert await run_once(config, None) == 0, config.with_suffix(".log").read_text()[-3000:]
        await check_the_account(gateway, steps)
        batches = [await gateway.admin.batch_groups(batch) for batch in range(steps)]
    assert config.with_suffix(".log").read_text().count("nothing lost, nothing trained twice") == count
    await check_final(Settings.load(config), batches, engine.given)


@pytest.mark.long
async def test_a_trainer_that_is_killed_while_its_weights_are_on_disk_loses_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = len(OFFLOAD) + 2
    async with world(tiny_model, tmp_path) as (gateway, engine):
        await gateway.admin.add_node("t0", ["train", "rollout"])
        config, run = tmp_path / "trainer.toml", tmp_path / "run"
        names = {"work": tmp_path, "steps": steps, "url": gateway.url, "model": tiny_model, "every": 1}
        config.write_text(
            TRAINER.format(**names).replace("[model]", 'nodes = ["t0"]\noffload = "disk"\n[model]')
        )
        for name, point in {"acknowledged": POINTS["acknowledged"], **OFFLOAD}.items():
            killed = await run_once(config, point)
            assert killed == -signal.SIGKILL, f"{name}: {config.with_suffix('.log').read_text()[-3000:]}"
        assert await run_once(config, None) == 0, config.with_suffix(".log").read_text()[-3000:]
        await check_the_account(gateway, steps)
        batches = [await gateway.admin.batch_groups(batch) for batch in range(steps)]
    assert all(path.name.startswith(KNOWN) for path in run.iterdir()), "nothing is left on the disk"
    await check_final(Settings.load(config), batches, engine.given)


@pytest.mark.parametrize(("every", "rounds"), [(1, 1), pytest.param(3, 2, marks=pytest.mark.long)])
async def test_a_trainer_that_is_killed_while_a_version_is_on_its_way_loses_nothing(
    tiny_model: Path, tmp_path: Path, every: int, rounds: int
) -> None:
    """Its batch is acknowledged, and the version is not written, not announced, or not live.

    Where not every version has a checkpoint, a second round finds the points at another distance from one.
    """
    steps = rounds * len(OVERLAPPED) + 2
    async with world(tiny_model, tmp_path) as (gateway, engine):
        config, run = tmp_path / "trainer.toml", tmp_path / "run"
        names = {"work": tmp_path, "steps": steps, "url": gateway.url, "model": tiny_model, "every": every}
        config.write_text(TRAINER.format(**names))
        for name, point in [*OVERLAPPED.items()] * rounds:
            killed = await run_once(config, point)
            assert killed == -signal.SIGKILL, f"{name}: {config.with_suffix('.log').read_text()[-3000:]}"
            status = await gateway.admin.status()
            written = newest(run / "weights")
            assert written == status["consumed"] - (name == "acknowledged, and not written"), name
            if name != "announced, and not live":
                assert status["newest_version"] == status["consumed"] - 1, name
        assert await run_once(config, None) == 0, config.with_suffix(".log").read_text()[-3000:]
        await check_the_account(gateway, steps)
        batches = [await gateway.admin.batch_groups(batch) for batch in range(steps)]
    trained = [group.group_id for batch in batches for group in batch]
    assert len(trained) == len(set(trained)) == steps * BATCH
    await check_final(Settings.load(config), batches, engine.given)


async def check_the_account(gateway: RunningGateway, steps: int) -> None:
    """Every version was made of the one before, every batch was consumed, and nothing was passed over."""
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"], status["orphaned_versions"]) == (steps, steps, [])
    parents = [(await gateway.admin.weights(v))["parent"] for v in range(1, steps + 1)]
    assert parents == list(range(steps))


def check_weights(
    settings: Settings, work: Path, batches: Sequence[Any], noted: dict[str, str], final: dict[str, Any]
) -> None:
    """Train the recorded batches in order, without interruption, and compares every version, to the bit."""
    straight = RankTrainer.open(
        settings.model_copy(update={"run": settings.run.model_copy(update={"dir": work})})
    )
    written = WeightsDirectory(work, settings.model.path)
    for version, batch in enumerate(batches, start=1):
        straight.train(batch)
        ours = written.write(version, version - 1, straight.model, straight.probe)
        manifest, theirs = json.loads((ours / "manifest.json").read_text()), json.loads(noted[ours.name])
        assert (manifest["files"], manifest["probe"]) == (theirs["files"], theirs["probe"]), ours.name
    parameters = straight.model.state_dict()
    assert final.keys() == parameters.keys()
    for name, value in final.items():
        assert torch.equal(value, parameters[name]), name


VICTIMS = (
    (0, "some groups accumulated"),
    (1, "some groups accumulated"),
    (1, "gradient whole"),
    (0, "stepped"),
    (1, "writing shards"),
    (0, "checkpoint not renamed"),
    (1, "gathered"),
    (0, "published"),
)
"""Ranks and where they die, one for each life of a run on two."""


async def run_two(config: Path, victim: int | None = None, point: Point | None = None) -> list[int | None]:
    """One life of a run on two ranks: how each ended, of itself but for the victim."""
    port = free_port()
    ranks = [
        await asyncio.to_thread(
            start,
            config,
            config.with_suffix(f".{rank}.log"),
            point if rank == victim else None,
            environment(rank, 2, port),
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            await asyncio.to_thread(process.join, LIMIT_S)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.parametrize(
    "victims", [VICTIMS[3:5], pytest.param(VICTIMS, marks=pytest.mark.long)], ids=["some", "all"]
)
async def test_two_ranks_either_of_which_is_killed_learn_what_an_uninterrupted_run_learns(
    tiny_model: Path, tmp_path: Path, victims: Sequence[tuple[int, str]]
) -> None:
    steps = len(victims) + 2
    async with world(tiny_model, tmp_path) as (gateway, engine):
        config = tmp_path / "trainer.toml"
        names = {"work": tmp_path, "steps": steps, "url": gateway.url, "model": tiny_model, "every": 1}
        config.write_text(TRAINER.format(**names))
        for victim, name in victims:
            ended = await run_two(config, victim, {**POINTS, **RANKS}[name])
            output = config.with_suffix(f".{1 - victim}.log").read_text()
            assert ended[victim] == -signal.SIGKILL, f"{name}: {output[-3000:]}"
            assert ended[1 - victim] == 1, f"{name}: {output[-3000:]}"
            assert f"RankLost: rank {1 - victim} lost rank {victim} in step" in output.rpartition("-- ")[2], (
                name
            )
        assert await run_two(config) == [0, 0], config.with_suffix(".0.log").read_text()[-3000:]
        status = await gateway.admin.status()
        assert (status["version"], status["consumed"], status["orphaned_versions"]) == (steps, steps, [])
        batches = [await gateway.admin.batch_groups(batch) for batch in range(steps)]
    trained = [group.group_id for batch in batches for group in batch]
    assert len(trained) == len(set(trained)) == steps * BATCH
    straight, _ = await asyncio.to_thread(
        on_ranks, 2, straight_on_two, Settings.load(config), tmp_path / "straight", batches
    )
    for version, expected in enumerate(straight, start=1):
        noted = json.loads(engine.given[f"v{version:06d}"])
        assert (noted["files"], noted["probe"]) == expected, version


@pytest.mark.long
async def test_two_ranks_that_are_stopped_write_a_checkpoint_first(tiny_model: Path, tmp_path: Path) -> None:
    async with world(tiny_model, tmp_path) as (gateway, _):
        config, port = tmp_path / "trainer.toml", free_port()
        names = {"work": tmp_path, "steps": 99, "url": gateway.url, "model": tiny_model, "every": 100}
        config.write_text(TRAINER.format(**names))
        logs = [config.with_suffix(f".{rank}.log") for rank in range(2)]
        ranks = [
            await asyncio.to_thread(start, config, logs[rank], None, environment(rank, 2, port))
            for rank in range(2)
        ]

        async def two_are_trained() -> bool:
            over = any(process.exitcode is not None for process in ranks)
            return over or (await gateway.admin.status())["consumed"] >= 2

        try:
            await until(two_are_trained, "two batches are trained", LIMIT_S)
            for process in ranks:
                process.terminate()
            for process in ranks:
                await asyncio.to_thread(process.join, LIMIT_S)
        finally:
            for process in ranks:
                process.kill()
        output = [log.read_text()[-3000:] for log in logs]
        assert [process.exitcode for process in ranks] == [130, 0], output
        assert newest(tmp_path / "run" / "checkpoints") >= (await gateway.admin.status())["consumed"], output


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_a_rank_that_is_killed_while_there_is_no_batch_ends_the_other(
    tiny_model: Path, tmp_path: Path, victim: int
) -> None:
    async with world(tiny_model, tmp_path, agents=False) as (gateway, _):
        config = tmp_path / "trainer.toml"
        names = {"work": tmp_path, "steps": 1, "url": gateway.url, "model": tiny_model, "every": 1}
        config.write_text(TRAINER.format(**names) + "[parallel]\ntimeout_s = 100\n")
        ended = await run_two(config, victim, IDLE[victim])
    output = config.with_suffix(f".{1 - victim}.log").read_text()
    step = ("heartbeat", "waiting for a command of rank 0")[1 - victim]
    assert (ended[victim], ended[1 - victim]) == (-signal.SIGKILL, 1), output[-3000:]
    assert f"RankLost: rank {1 - victim} lost rank {victim} in step '{step}'" in output
