"""The whole loop against a gateway with a fake engine, and its crash cases."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from headgate.client import GatewayClient, GatewayRefused
from headgate.types import Group
from tests.harness.gateways import RunningGateway, gateway_of, run_gateway, settings_for
from tests.harness.waiting import until, within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, settings_of, train_one
from trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlusSettings
from trainer.config.settings import Settings
from trainer.data.batch import Batch
from trainer.errors import ConfigError, FeedBroken, GatewayAhead, StepTimeout
from trainer.loop.feed import Feed
from trainer.loop.nodes import Nodes
from trainer.loop.tasks import Companion, run_with_companions
from trainer.loop.training_loop import TrainingLoop
from trainer.rank_trainer import RankTrainer
from trainer.report.metrics import Metrics, phases, sparkline
from trainer.report.tracking import Trackers


class Watching(RankTrainer):
    """Knows whose the node is whenever it computes."""

    role: Callable[[], str]

    taken = 0
    """Groups."""

    def add_groups(self, batch: Batch, groups: Sequence[Group]) -> None:
        assert self.role() == "train"
        super().add_groups(batch, groups)
        self.taken += len(groups)

    def step(self, batch: Batch) -> dict[str, float]:
        assert self.role() == "train"
        return super().step(batch)


@asynccontextmanager
async def watching(
    gateway: RunningGateway, settings: Settings
) -> AsyncIterator[tuple[TrainingLoop, Watching]]:
    """A loop that has the node `t0`, and its trainer."""
    node = gateway.services.coordinator.nodes.nodes["t0"]
    with Metrics(settings.run.dir, settings.run.steps) as metrics:
        trainer = Watching.open(settings)
        assert isinstance(trainer, Watching)
        trainer.role = lambda: node.role
        loop = TrainingLoop(settings, trainer, gateway.admin, metrics)
        await loop.check_versions()
        yield loop, trainer


async def earn(gateway: RunningGateway, group: str) -> None:
    """A group of two, of which one is better."""
    for reward in (0.0, 1.0):
        opened = await gateway.admin.open_episode(group, group, 2)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        assert (await gateway.chat(headers, max_tokens=4)).is_success
        await gateway.admin.reward(opened.episode_id, reward)


@pytest.mark.parametrize("lent", [False, True])
async def test_a_trainer_begins_with_a_partial_batch_once_no_other_needs_its_node(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lent: bool
) -> None:
    """The batch is of two groups, and only one exists; a lent node is recalled when no further one comes."""
    monkeypatch.setattr("trainer.loop.feed.RECALL_POLL_S", 0.02)
    await gateway.admin.add_node("t0", ["train", "rollout"])
    async with watching(gateway, settings_of(gateway, tiny_model, tmp_path, nodes=["t0"])) as (loop, trainer):
        checks, recalled = 0, loop.feed.recalled

        async def recalled_after_some_checks(node: str) -> bool:
            nonlocal checks
            checks += 1
            assert not loop.nodes.can_compute
            return await recalled(node) and (checks > 5 or not lent)

        monkeypatch.setattr(loop.feed, "recalled", recalled_after_some_checks)
        work = asyncio.create_task(loop.train(), name="trainer")
        await earn(gateway, "a")
        await until(lambda: trainer.taken == 1, "the first group is taken", 60)
        assert checks == (6 if lent else 1)
        assert loop.feed.current_lease.batch == 0
        await earn(gateway, "b")
        await until(lambda: trainer.taken == 2, "the second is taken", 60)
        work.cancel()
        await asyncio.wait({work})


async def test_nodes_are_claimed_before_anything_is_computed_and_released_while_the_trainer_waits(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    await gateway.admin.add_node("t0", ["train", "rollout"])
    node = gateway.services.coordinator.nodes.nodes["t0"]
    settings = settings_of(gateway, tiny_model, tmp_path, nodes=["t0"])
    on_disk = settings.gateway.model_copy(update={"offload": "disk"})
    settings = settings.model_copy(update={"gateway": on_disk})
    async with watching(gateway, settings) as (loop, _):
        assert loop.nodes.can_compute, "its weights are on the node"
        async with episodes(gateway), within("the trainer is through"):
            await run_with_companions(loop.train(), loop.node_claim_task())
    assert (await gateway.admin.status())["version"] == 2
    assert node.seconds["train"] > 0
    assert (node.role, node.holder) == ("idle", "")
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    assert all(record["seconds/idle"] >= record["seconds/claim"] > 0 for record in records)
    recorded = Path(gateway.settings.control.recording or "").read_text().splitlines()
    released = [json.loads(line)["value"] for line in recorded if '"action":"lending.released"' in line]
    computed = [0.0, *(record["seconds/compute"] - record["seconds/step"] for record in records)]
    loaded = [0.0, *(record["seconds/onload"] for record in records)]
    assert [(value["busy_s"], value["load_s"]) for value in released] == list(
        zip(computed, loaded, strict=True)
    )
    trained, last, memory = (await gateway.admin.status())["trained"], records[-1], loop.nodes.memory
    assert memory is not None
    assert (trained["batch"], trained["busy_s"], trained["load_s"]) == (1, computed[-1], loaded[-1])
    rest = ("step", "checkpoint", "publish", "ack")
    assert trained["rest_s"] >= memory.free_s + sum(last[f"seconds/{what}"] for what in rest)
    waited = last["seconds/idle"] + trained["busy_s"]
    assert trained["rest_s"] <= memory.free_s + last["seconds/total"] - waited
    assert min(*computed[1:], *loaded[1:], *(record["seconds/offload"] for record in records)) > 0
    with pytest.raises(GatewayRefused, match="no node 'nowhere'"):
        await Nodes(loop.feed, ["nowhere"]).claim()


async def test_every_version_is_trained_published_and_acknowledged(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    opened, through = loop_of(gateway, settings, Trackers(settings)), within("the trainer is through")
    async with episodes(gateway), opened as loop, through:
        await loop.train()
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"]) == (2, 2)
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    assert [record["version"] for record in records] == [1, 2]
    assert all(record["trained_tokens"] > 0 for record in records)
    assert all(record["staleness_max"] <= 1 for record in records)
    for record in records:
        by_staleness = [n for name, n in record.items() if name.startswith("staleness_tokens/")]
        assert sum(by_staleness) == record["trained_tokens"]
        seconds = {name: value for name, value in record.items() if name.startswith("seconds/")}
        assert seconds.keys() >= {"seconds/lease", "seconds/step", "seconds/checkpoint", "seconds/ack"}
        assert seconds["seconds/idle"] + seconds["seconds/compute"] <= seconds["seconds/total"]
        assert record["idle_share"] == seconds["seconds/idle"] / seconds["seconds/total"]
        for name in ("idle", "compute", "publish"):
            spent = sum(end - start for kind, start, end in record["spans"] if kind == name)
            assert spent == pytest.approx(seconds[f"seconds/{name}"], abs=0.01)
    assert list((settings.run.dir / "tensorboard").iterdir())
    events = [event["data"] async for event in gateway.admin.events(after=0, kinds=["trainer"], wait_s=0)]
    internal = {"time", "version", "batch", "spans"}
    assert events == [
        {
            "step": record["version"],
            "version": record["version"],
            "run": f"{tmp_path.name}/run",
            "figures": {name: value for name, value in record.items() if name not in internal},
        }
        for record in records
    ]


@pytest.mark.long
async def test_two_trainers_train_two_models_behind_one_gateway(tiny_model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        staleness = {"batch": 2, "eta": 1, "min_members": 1}
        opened = gateway_of(
            tiny_model, tmp_path, {"actor": {}, "planner": {}}, staleness=staleness, update={"probe": False}
        )
        gateway, engines = await stack.enter_async_context(opened)
        trainers = []
        for name, steps in (("actor", 1), ("planner", 2)):
            await stack.enter_async_context(episodes(gateway, name))
            settings = settings_of(gateway, tiny_model, tmp_path / name, name, steps=steps)
            trainers.append(await stack.enter_async_context(loop_of(gateway, settings)))
        async with within("the trainer is through", 120):
            await asyncio.gather(*(loop.train() for loop in trainers))
        for name, steps in (("actor", 1), ("planner", 2)):
            status = await gateway.admin.status(name)
            assert (status["model"], status["version"], status["consumed"]) == (name, steps, steps)
            assert status["weights"] == str(tmp_path / name / "run" / "weights" / f"v00000{steps}")
            assert engines[name].label == str(steps)


@pytest.mark.parametrize("published", [False, True])
async def test_a_crash_after_the_checkpoint_trains_nothing_twice(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, published: bool
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with episodes(gateway):
        async with loop_of(gateway, settings) as loop, within("the trainer is through"):
            await train_one(loop, publish=published, ack=False)
        # A new process: it holds the checkpoint of version 1, and is given batch 0 again.
        async with loop_of(gateway, settings) as loop, within("the trainer is through"):
            assert loop.trainer.version == 1
            assert (await loop.feed.lease()).batch == 0
            await loop.train()
    assert (await gateway.admin.status())["consumed"] == 2
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    assert [record["batch"] for record in records] == [1]


async def test_a_batch_that_the_gateway_will_not_pass_over_is_refused_by_name(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with episodes(gateway), within("the trainer is through"), loop_of(gateway, settings) as loop:
        await train_one(loop, ack=False)
        loop.trainer.groups = ("others",)

        async def nack(_reason: str) -> None:
            return

        monkeypatch.setattr(loop.feed, "nack", nack)
        with pytest.raises(FeedBroken, match=r"version 1 were not trained on the groups of batch 0, and"):
            await loop.train()


@pytest.mark.parametrize("acknowledged", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_an_older_checkpoint_begins_a_new_line(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, acknowledged: bool
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    few = settings.publish.model_copy(update={"keep": 2})  # 2 and 3, in addition to the parent of 3
    settings = settings.model_copy(update={"publish": few})
    weights = settings.run.dir / "weights"
    async with episodes(gateway):
        async with loop_of(gateway, settings) as loop, within("the trainer is through"):
            await train_one(loop)
            await train_one(loop, ack=acknowledged)
        shutil.rmtree(loop.trainer.checkpoints / "v000002")
        async with loop_of(gateway, settings) as loop, within("the trainer is through"):
            assert (loop.trainer.version, loop.trainer.parent, loop.trainer.steps) == (3, 1, 1)
            status = await gateway.admin.status()
            assert (status["version"], status["orphaned_versions"]) == (3, [2])
            again, before = (weights / f"v00000{v}" / "model.safetensors" for v in (3, 1))
            assert again.read_bytes() == before.read_bytes()
            await loop.train()
    status = await gateway.admin.status()
    assert (status["version"], status["consumed"], status["orphaned_versions"]) == (4, 4, [2])
    assert [(await gateway.admin.weights(v))["parent"] for v in (1, 2, 3, 4)] == [0, 1, 1, 3]


async def test_a_new_line_that_was_not_published_before_a_crash_is_published_after_it(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    async with episodes(gateway), within("the trainer is through"):
        async with loop_of(gateway, settings) as loop:
            await train_one(loop)
            loop.trainer.renumber(4)  # 2 and 3 were used by a line that is lost
            await loop.checkpoints.write()
        async with loop_of(gateway, settings) as loop:
            assert (loop.trainer.version, loop.trainer.parent) == (4, 1)
            await loop.train()
    assert [(await gateway.admin.weights(v))["parent"] for v in (4, 5)] == [1, 4]
    assert (await gateway.admin.status())["consumed"] == 5


async def test_a_number_that_was_written_but_never_published_is_not_used_again(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
    async with episodes(gateway), within("the trainer is through"):
        async with loop_of(gateway, settings) as loop:
            await loop.train()
            loop.weights.path(2).mkdir()
        async with loop_of(gateway, settings) as loop:
            assert (loop.trainer.version, loop.trainer.parent) == (3, 1)
    status = await gateway.admin.status()
    assert (status["version"], status["orphaned_versions"]) == (3, [])


async def test_a_start_removes_what_dead_processes_left_half_written(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path)
    folders = [settings.run.dir / name for name in ("weights", "checkpoints")]
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    before = [f".v000001.tmp-{dead.pid}", f".v000004.tmp-{os.getpid()}", ".v000002.gone"]
    alive = [f".v000003.tmp-{os.getppid()}", "v000001.rejected"]
    for folder in folders:
        for name in [*before, *alive]:
            (folder / name).mkdir(parents=True)
            (folder / name / "model.safetensors").touch()
    async with loop_of(gateway, settings):
        mine = {"v000000", ".v000000.whole"}
        assert [sorted({path.name for path in folder.iterdir()} - mine) for folder in folders] == [
            sorted(alive)
        ] * 2


async def test_a_gateway_that_is_ahead_is_an_error(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=1)
    async with episodes(gateway), loop_of(gateway, settings) as loop, within("the trainer is through"):
        await loop.train()
    lost = settings_of(gateway, tiny_model, tmp_path / "elsewhere")
    with pytest.raises(GatewayAhead, match="version 1"):
        async with loop_of(gateway, lost):
            pass


@pytest.mark.parametrize("group_baseline", [False, True])
async def test_a_mean_over_the_batch_is_refused_where_the_gateway_drops_groups(
    tiny_model: Path, tmp_path: Path, group_baseline: bool
) -> None:
    """A group of equal rewards moves that mean; where each reward has its group's taken off first, it does not."""
    staleness = {"batch": 2, "drop_equal": True}
    async with run_gateway(
        settings_for(tiny_model, tmp_path, staleness=staleness, update={"probe": False})
    ) as gateway:
        settings = settings_of(gateway, tiny_model, tmp_path)
        algorithm = ReinforcePlusPlusSettings(group_baseline=group_baseline)
        settings = settings.model_copy(update={"algorithm": algorithm})
        refused = pytest.raises(ConfigError, match="drop_equal = false")
        with nullcontext() if group_baseline else refused:
            async with loop_of(gateway, settings):
                pass


async def test_positions_for_other_rows_than_the_engines_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with run_gateway(settings_for(tiny_model, tmp_path)) as gateway:
        settings, longest = settings_of(gateway, tiny_model, tmp_path), 2048  # the gateway's default
        refused = pytest.raises(
            ConfigError, match=r"max_model_len = 4096, but engines accept rows of 2048 tokens"
        )
        for wanted, response in ((longest, nullcontext()), (2 * longest, refused)):
            model = settings.model.model_copy(update={"max_model_len": wanted})
            with response:
                async with loop_of(gateway, settings.model_copy(update={"model": model})):
                    pass


async def test_an_unavailable_gateway_is_reported_once_and_then_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every look at the clock takes a while of its own, and none of the machine's."""
    monkeypatch.setattr("trainer.loop.feed._REPORT_AFTER_S", 0.0)
    monkeypatch.setattr("trainer.loop.feed.RETRY_S", 0.01)
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) * 0.05)
    monkeypatch.setattr("trainer.loop.feed.time", clock)
    messages: list[str] = []
    async with GatewayClient("http://127.0.0.1:9") as client:
        with pytest.raises(StepTimeout, match="check versions"):
            await Feed(client, None, 0.2, messages.append).status()
    assert [line.partition(":")[0] for line in messages] == [
        "step 'check versions' waits for the gateway, up to 0.2 s"
    ]


async def test_a_node_that_a_restarted_gateway_does_not_know_yet_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.loop.feed.RETRY_S", 0.0)
    responses = ["no node", "known", "no node", "no node", "known"]

    class Client:
        async def release(self, node: str, *_: object) -> None:
            if responses.pop(0) == "no node":
                raise GatewayRefused(404, f"no node {node!r}", "no_node", None)

    feed = Feed(Client(), None, 60.0)  # type: ignore[arg-type]
    with pytest.raises(GatewayRefused, match="no node 'wrong'"):
        await feed.release("wrong", 0.0)
    await feed.release("t0", 0.0)
    await feed.release("t0", 0.0)
    assert responses == []


async def test_a_batch_that_never_comes_names_the_step(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.loop.feed.POLL_S", 0.05)
    settings = settings_of(gateway, tiny_model, tmp_path, batch_timeout_s=0.2)
    async with loop_of(gateway, settings) as loop:
        with pytest.raises(StepTimeout, match=r"'stream'.*0 of 2 groups"):
            await loop.train()


async def test_work_ends_when_a_companion_fails() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def companion() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await run_with_companions(work(), None, Companion("companion", companion()))
    assert cancelled.is_set()


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_phases_are_drawn_to_scale_and_sums_are_none() -> None:
    times = {"lease": 1.0, "stream": 4.0, "ack": 0.001, "idle": 3.0, "total": 5.0}
    record = {"loss": 1.0, **{f"seconds/{name}": seconds for name, seconds in times.items()}}
    shown = phases(record)
    assert [name for name, _ in shown] == ["lease", "stream"]
    assert [bar.count("█") for _, bar in shown] == [8, 32]
    assert shown[1][1].endswith("4.00 s   80%")
