"""Reactions of the supervisor to nodes that join and leave and to processes that end; the tests end the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.processes.errors import GivenUp
from headgate.processes.ports import free_port
from headgate.processes.supervised import ProcessEnded, SupervisedProcess
from scheduler.cluster.errors import ClusterError, NodeLost, Unsatisfied
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.launch import Job, Running
from scheduler.cluster.ranks import Ranks
from scheduler.cluster.registry import Address
from scheduler.cluster.supervisor import Supervisor
from scheduler.cluster.tags import Capacity, DiscoveredNode
from tests.harness.waiting import result_of, turns, until
from tests.unit.scheduler.cluster.processes import Process

GROUP = '[[groups]]\nname = "s"\ntags = ["rollout"]\nmost = 2\n'
LEARNER = '[nodes.t]\ntags = ["train"]\n'
ONE = '[nodes.a]\ntags = ["rollout"]\n'
BOTH = '[nodes.a]\ntags = ["rollout", "train"]\n'
TRAINER = '[trainer]\ncommand = ["train"]\n'


class StopRecorder(Process):
    """Records when it is stopped."""

    def __init__(self, job: Job, stopped: list[str]) -> None:
        super().__init__(job.placement.name)
        self.job = job
        self._stopped = stopped

    async def stop(self, grace_s: float) -> None:
        if not self.stopped:
            self._stopped.append(self.name if grace_s else f"{self.name} immediately")
        await super().stop(grace_s)


class Machines:
    """A launcher whose nodes are the test's."""

    def __init__(self) -> None:
        self.nodes: list[DiscoveredNode] = []
        self.started: list[StopRecorder] = []
        self.stopped: list[str] = []
        self.lost: set[str] = set()
        """Places at which nothing can be started."""
        self.closed = False

    def add(self, name: str, *tags: str) -> None:
        self.nodes.append(DiscoveredNode(name, dict.fromkeys(tags, "true"), Capacity(8, 0, 64)))

    def remove(self, *names: str) -> None:
        self.nodes = [node for node in self.nodes if node.id not in names]

    def at(self, place: str) -> list[StopRecorder]:
        """All that was ever started there."""
        return [process for process in self.started if process.name == place]

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    async def discover(self) -> list[DiscoveredNode]:
        return list(self.nodes)

    async def start(self, jobs: Sequence[Job]) -> list[Running]:
        if gone := [job.placement.name for job in jobs if job.placement.name in self.lost]:
            raise NodeLost(f"{gone} is lost")
        new = [StopRecorder(job, self.stopped) for job in jobs]
        self.started += new
        return list(new)


class Cluster:
    """A supervisor of such machines; its gateway is a process of the test's, too."""

    def __init__(self, folder: Path, text: str, **nodes: Sequence[str]) -> None:
        self.port = free_port()
        gateway = folder / "gateway.toml"
        gateway.write_text(
            f'[server]\nport = {self.port}\n[models.demo]\npath = "{folder}"\n[engine]\nlaunch = "fake"\ncount = 0\n'
        )
        (folder / "config.json").write_text("{}")
        path = folder / "cluster.toml"
        head = f'[cluster]\nlauncher = "ray"\npoll_interval_s = 0.05\nrestarts = 0\ndir = "{folder}"\n[ray]\nwait_s = 0.1\n'
        path.write_text(f'{head}[gateway]\nconfig = "{gateway}"\n{text}')
        self.machines = Machines()
        for name, tags in nodes.items():
            self.machines.add(name, *tags)
        self.lines: list[str] = []
        self.healthy = True
        self.supervisor = Supervisor(
            ClusterFile.load(path), self.machines, self.lines.append, lambda *_: self.lines.append("shown")
        )
        self.gateway: Process | None = None
        self.supervisor._gateway = self._gateway  # type: ignore[method-assign]

    @property
    def ranks(self) -> Ranks:
        """The trainer."""
        assert self.supervisor._ranks is not None
        return self.supervisor._ranks

    async def rank_jobs(self) -> list[Job]:
        """The ranks' jobs, if they were started now."""
        before = len(self.machines.started)
        await self.ranks.start()
        return [process.job for process in self.machines.started[before:]]

    @property
    def engines(self) -> list[str]:
        """The places of engines that should run."""
        return [place.name for place in self.supervisor._assignment.engines]

    @property
    def addresses(self) -> dict[str, Address]:
        """The engines that the gateway should have."""
        autoscaler = self.supervisor._autoscaler
        return self.supervisor._engines.addresses(autoscaler.leaving if autoscaler else None)

    async def start(self) -> None:
        await self.supervisor._wait_for_nodes()
        await self.tend()

    async def tend(self) -> None:
        await self.supervisor._refresh_nodes()
        await self.supervisor._engines.update(self.supervisor._assignment.engines, self.supervisor._widest)

    async def _responds(self, _url: str) -> bool:
        return self.healthy

    def _gateway(self, _registry: object) -> SupervisedProcess:
        async def start() -> Sequence[Running]:
            place = self.supervisor._assignment.engines[0]
            job = Job(place, (), {}, True, Capacity())
            self.gateway = StopRecorder(job, self.machines.stopped)
            self.gateway.name = "gateway"
            return [self.gateway]

        return SupervisedProcess("gateway", start, self.supervisor._budget(), self.lines.append)


ClusterOf = Callable[..., Cluster]


@pytest.fixture
async def cluster_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClusterOf]:
    """Makes clusters whose engines end with the test."""
    made: list[Cluster] = []

    def make(text: str, **nodes: Sequence[str]) -> Cluster:
        made.append(Cluster(tmp_path, text, **nodes))
        monkeypatch.setattr("scheduler.cluster.engines.responds", made[-1]._responds)
        return made[-1]

    yield make
    for cluster in made:
        await cluster.supervisor._engines.stop_all()


async def test_the_remaining_processes_continue_and_a_missing_node_is_reported_once(
    cluster_of: ClusterOf,
) -> None:
    cluster = cluster_of(GROUP + LEARNER + TRAINER, x=["rollout"], y=["rollout"], t=["train"])
    supervisor = cluster.supervisor
    await supervisor._wait_for_nodes()
    assert cluster.engines == ["s-x-0", "s-y-0"]
    cluster.machines.remove("y", "t")
    for _ in range(3):
        await supervisor._refresh_nodes()
    assert cluster.engines == ["s-x-0"]
    assert cluster.lines[0] == "s-y, t left"
    assert sum("the other processes continue" in line for line in cluster.lines) == 1
    table = supervisor._file.trainer
    assert table is not None
    with pytest.raises(Unsatisfied, match="node t has left, and no other node can run the trainer"):
        await cluster.ranks.start()
    cluster.machines.add("u", "train")
    cluster.machines.add("z", "rollout")
    await supervisor._refresh_nodes()
    assert cluster.engines == ["s-x-0", "s-z-0"]
    assert "s-z, t joined" in cluster.lines
    assert [place.node.discovered.id for place in supervisor._assignment.ranks] == ["u"]
    before = len(cluster.lines)
    await supervisor._refresh_nodes()
    assert len(cluster.lines) == before, "nothing is new"


async def test_an_engine_goes_to_the_node_that_takes_its_nodes_place(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(ONE, x=["rollout"])
    await cluster.start()
    await until(lambda: len(cluster.machines.at("a-0")) == 1, "a-0 has an engine")
    await cluster.tend()
    cluster.machines.remove("x")
    cluster.machines.add("y", "rollout")
    await cluster.tend()
    await until(lambda: len(cluster.machines.at("a-0")) == 2, "a-0 has two")
    first, second = cluster.machines.at("a-0")
    assert (first.job.placement.node.discovered.id, second.job.placement.node.discovered.id) == ("x", "y")
    assert (first.stopped, second.stopped) == (True, False)


async def test_only_a_healthy_engine_is_registered(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(ONE, x=["rollout"])
    cluster.healthy = False
    await cluster.start()
    engine = cluster.supervisor._engines._engines["a-0"].process
    await until(lambda: len(engine.running) == 1, "the engine runs")
    assert cluster.addresses == {}
    cluster.healthy = True
    await result_of(engine.up.wait(), "the engine is up")
    (address,) = cluster.addresses.values()
    assert (address.url, address.node) == ("http://127.0.0.1:1", "a")


async def test_one_engine_that_is_given_up_is_not_the_end_and_the_last_one_is(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(GROUP, x=["rollout"], y=["rollout"])
    cluster.machines.lost = {"s-x-0"}
    await cluster.start()
    engines = cluster.supervisor._engines._engines
    await asyncio.wait({engines["s-x-0"].task}, timeout=60)
    await cluster.tend()
    assert any("s-x-0 is given up after 0 restarts" in line for line in cluster.lines)
    await until(lambda: len(cluster.machines.at("s-y-0")) == 1, "s-y-0 has an engine")
    cluster.machines.at("s-y-0")[0].ended.set_result(ProcessEnded(1, ""))
    await asyncio.wait({engines["s-y-0"].task}, timeout=60)
    with pytest.raises(GivenUp, match="all engines failed permanently"):
        await cluster.tend()


async def test_the_environment_of_ranks_is_torchruns(cluster_of: ClusterOf) -> None:
    text = '[[groups]]\nname = "t"\ntags = ["train"]\ncount = 2\nmost = 2\n' + ONE
    trainer = 'ranks = 3\ncpus = 4\nenv = { MINE = "yes", MASTER_PORT = "5" }\n'
    cluster = cluster_of(text + TRAINER + trainer, x=["rollout"], t1=["train"], t2=["train"])
    await cluster.supervisor._wait_for_nodes()
    assert cluster.supervisor._file.trainer is not None
    await cluster.ranks.start()
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
    jobs = [process.job for process in cluster.machines.started]
    assert [[job.env[name] for name in names] for job in jobs] == [
        ["0", "0", "2", "0", "3"],
        ["1", "1", "2", "0", "3"],
        ["2", "0", "1", "1", "3"],
    ]
    assert {job.env["HEADGATE_TRAIN_NODES"] for job in jobs} == {"t-t1,t-t2"}
    assert {(job.env["MINE"], job.env["MASTER_PORT"]) for job in jobs} == {("yes", "5")}
    assert {(job.trusted, job.reserve) for job in jobs} == {(True, Capacity(cpus=4))}


@pytest.mark.parametrize(("text", "reserved"), [(ONE + LEARNER, 2.0), (BOTH, 0.0)])
async def test_an_engine_reserves_what_it_needs_unless_it_takes_turns_with_a_rank(
    cluster_of: ClusterOf, text: str, reserved: float
) -> None:
    cluster = cluster_of(text + TRAINER + "[engine]\ncpus = 2\n", x=["rollout", "train"], t=["train"])
    await cluster.start()
    await until(lambda: len(cluster.machines.at("a-0")) == 1, "a-0 has an engine")
    (engine,) = cluster.machines.at("a-0")
    assert (engine.job.reserve.cpus, engine.job.trusted) == (reserved, False)


async def test_the_command_of_an_engine_has_its_number_of_gpus(cluster_of: ClusterOf) -> None:
    text = (
        ONE
        + '[nodes.b]\ntags = ["rollout"]\nzone = "b"\nengine_gpus = 4\n[engine]\ncommand = ["serve", "-tp={gpus}"]\n'
    )
    cluster = cluster_of(text)
    cluster.machines.nodes = [
        DiscoveredNode(zone, {"rollout": "true", "zone": zone}, Capacity(8, 4, 64)) for zone in "ab"
    ]
    await cluster.start()
    await until(lambda: len(cluster.machines.started) == 2, "both engines are started")
    jobs = {process.name: process.job for process in cluster.machines.started}
    assert {name: (job.argv[1], job.reserve.gpus) for name, job in jobs.items()} == {
        "a-0": ("-tp=1", 0),
        "b-0": ("-tp=4", 4),
    }


class Gateway:
    """A fake gateway, in place of a registry, that records the engines that it receives."""

    def __init__(self) -> None:
        self.updates: list[set[str]] = []

    async def update(self, _nodes: Any, engines: dict[str, Any], _claimed: Any = None) -> bool:
        self.updates.append(set(engines))
        return True

    async def responds(self, _path: str = "/healthz") -> bool:
        return False


class Elastic(Gateway):
    """One that has engines until the test removes them, and whose trainer reports how long it was busy."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.has, self.version = set[str](), 0
        self.status_now: dict[str, Any] = {}
        self.starting = ""

    async def has_none(self, engines: set[str]) -> bool:
        return not self.has & engines

    async def status(self) -> dict[str, Any]:
        return self.status_now

    async def steps(self, after: int) -> list[tuple[int, dict[str, float]]]:
        """The trainer reports no steps."""
        return []

    async def trains(self, **busy: float) -> None:
        """Two steps, with all engines that should run. `busy`: the report of the trainer."""
        for _ in range(2):
            self.version += 1
            self.has = set(self.cluster.engines)
            states = {name: "starting" if name == self.starting else "open" for name in sorted(self.has)}
            rows = [{"name": name, "model": "demo", "state": state} for name, state in states.items()]
            trained = {"batch": self.version - 1, "busy_s": 1e-9, "load_s": 0.0, "rest_s": 0.0, **busy}
            fills = [{"batch": self.version, "state": "PENDING"}]
            status = {
                "model": "demo",
                "version": self.version,
                "batches": fills,
                "engines": rows,
                "trained": trained,
            }
            self.status_now = status
            await self.rescale()
            await self.cluster.tend()

    async def rescale(self) -> None:
        autoscaler = self.cluster.supervisor._autoscaler
        assert autoscaler is not None
        await self.cluster.supervisor._rescale(self, autoscaler)  # type: ignore[arg-type]


async def grown(cluster: Cluster, **busy: float) -> Elastic:
    """Of two nodes the second is spare, and used; its engine is to be given back."""
    gateway = Elastic(cluster)
    await cluster.start()
    assert cluster.engines == ["s-x-0"]
    await gateway.trains()
    await gateway.trains()
    assert cluster.engines == ["s-x-0", "s-y-0"]
    for engine in cluster.supervisor._engines._engines.values():
        await result_of(engine.process.up.wait(), "the engine is up")
    await gateway.trains(**busy)
    assert any("s-y is given back" in line for line in cluster.lines)
    return gateway


async def test_the_trainer_goes_on_with_a_node_more_and_without_it_when_that_is_gone(
    cluster_of: ClusterOf,
) -> None:
    text = ONE + '[nodes.b]\ntags = ["rollout", "train"]\n' + LEARNER
    trainer = TRAINER + "claims = true\n[elastic]\nsteps = 1\nranks = 2\n"
    cluster = cluster_of(text + trainer, a=["rollout"], b=["rollout", "train"], t=["train"])
    gateway = Elastic(cluster)
    await cluster.start()
    assert cluster.supervisor._claimed == {"t"}
    await gateway.trains(busy_s=1e6)
    await gateway.trains(busy_s=1e6)
    assert cluster.supervisor._claimed == {"t", "b"}
    assert [job.env["RANK"] for job in await cluster.rank_jobs()] == ["0", "1"]
    cluster.machines.remove("b")
    await cluster.tend()
    assert cluster.supervisor._claimed == {"t"}
    assert [job.env["WORLD_SIZE"] for job in await cluster.rank_jobs()] == ["1"]
    cluster.machines.add("b", "rollout", "train")
    await cluster.tend()
    assert cluster.supervisor._claimed == {"t"}, "its rank does not run"


async def test_the_engine_of_a_node_that_is_given_back_ends_once_the_gateway_has_let_it_go(
    cluster_of: ClusterOf,
) -> None:
    cluster = cluster_of(GROUP + "[elastic]\nsteps = 1\n", x=["rollout"], y=["rollout"])
    gateway = await grown(cluster, rest_s=1e6)
    await gateway.rescale()
    await cluster.tend()
    assert set(cluster.addresses) == {"s-x-0"}, "the gateway is to let it go"
    assert cluster.machines.stopped == [], "its calls may still run"
    gateway.has = {"s-x-0"}
    await gateway.rescale()
    await cluster.tend()
    assert "s-y left" in cluster.lines
    assert cluster.machines.stopped == ["s-y-0"]
    await cluster.tend()
    assert cluster.engines == ["s-x-0"], "it is spare"


async def test_no_step_counts_until_the_engine_of_a_new_node_has_been_ready(cluster_of: ClusterOf) -> None:
    group = GROUP.replace("most = 2", "most = 3") + "[elastic]\nsteps = 1\n"
    cluster = cluster_of(group, x=["rollout"], y=["rollout"], z=["rollout"])
    gateway = Elastic(cluster)
    await cluster.start()
    for starting, nodes in (("s-y-0", 1), ("s-y-0", 2), ("s-y-0", 2), ("", 3)):
        gateway.starting = starting
        await gateway.trains()
        assert len(cluster.engines) == nodes


async def test_a_node_that_must_stand_in_for_one_that_left_is_not_given_back(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(GROUP + "[elastic]\nsteps = 1\n", x=["rollout"], y=["rollout"])
    gateway = await grown(cluster, load_s=1e6)
    cluster.machines.remove("x")
    await cluster.tend()
    await gateway.rescale()
    assert cluster.engines == list(cluster.addresses) == ["s-y-0"]
    assert cluster.machines.stopped == ["s-x-0"]


async def test_a_trainer_that_does_not_report_its_busy_time_is_named_once(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(GROUP + "[elastic]\nsteps = 1\n", x=["rollout"], y=["rollout"])
    await cluster.supervisor._wait_for_nodes()
    gateway = Elastic(cluster)
    for version in range(5):
        fills = [{"batch": version, "state": "PENDING"}]
        row = {"name": "s-x-0", "model": "demo", "state": "open"}
        status = {
            "model": "demo",
            "version": version,
            "batches": fills,
            "engines": [row],
            "trained": None,
        }
        gateway.status_now = status
        await gateway.rescale()
    (line,) = [line for line in cluster.lines if "busy_s" in line]
    assert "such as that of batch 1" in line


async def test_the_trainer_begins_once_the_gateway_knows_an_engine(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(BOTH + TRAINER, x=["rollout", "train"])
    cluster.healthy, gateway = False, Gateway()
    await cluster.supervisor._wait_for_nodes()
    tasks = [
        asyncio.create_task(cluster.ranks.run(), name="trainer"),
        asyncio.create_task(cluster.supervisor._poll(gateway), name="tend"),  # type: ignore[arg-type]
    ]
    await until(lambda: len(gateway.updates) >= 3, "the gateway received updates")
    await turns(50)
    assert (gateway.updates[-1], cluster.machines.at("trainer-0")) == (set(), [])
    cluster.healthy = True
    await until(lambda: len(cluster.machines.at("trainer-0")) == 1, "the trainer runs")
    assert {"a-0"} in gateway.updates
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_everything_ends_in_its_order(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(BOTH + TRAINER, x=["rollout", "train"])
    running = asyncio.create_task(cluster.supervisor.run(), name="run")
    cluster.ranks.may_start.set()
    await until(lambda: len(cluster.machines.started) == 2 and cluster.gateway is not None, "all run")
    cluster.supervisor._on_signal()
    assert await result_of(running, "the supervisor ends") == 0
    assert cluster.machines.stopped == ["trainer-0", "gateway", "a-0"]
    assert cluster.machines.closed
    assert cluster.lines[-1] == "stopping"


async def test_the_end_of_the_trainer_is_the_end(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(BOTH + TRAINER, x=["rollout", "train"])
    running = asyncio.create_task(cluster.supervisor.run(), name="run")
    cluster.ranks.may_start.set()
    await until(lambda: len(cluster.machines.at("trainer-0")) == 1 and cluster.gateway is not None, "all run")
    cluster.machines.at("trainer-0")[0].ended.set_result(ProcessEnded(0, ""))
    assert await result_of(running, "the supervisor ends") == 0
    assert cluster.lines[-1] == "the trainer has ended"


async def test_a_second_signal_ends_everything_immediately(
    cluster_of: ClusterOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, never, stop = (
        cluster_of(BOTH + TRAINER, x=["rollout", "train"]),
        asyncio.Event(),
        StopRecorder.stop,
    )

    async def stubborn(self: StopRecorder, grace_s: float) -> None:
        if self.name == "trainer-0":
            await never.wait()
        await stop(self, grace_s)

    monkeypatch.setattr(StopRecorder, "stop", stubborn)
    running = asyncio.create_task(cluster.supervisor.run(), name="run")
    cluster.ranks.may_start.set()
    await until(lambda: len(cluster.machines.started) == 2 and cluster.gateway is not None, "all run")
    cluster.supervisor._on_signal()
    await turns(50)
    assert (running.done(), cluster.machines.stopped) == (False, [])
    cluster.supervisor._on_signal()
    assert await result_of(running, "the supervisor ends") == 1
    assert cluster.machines.stopped == ["gateway immediately", "a-0 immediately"]
    never.set()


async def test_where_something_listens_already_nothing_is_started(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(ONE, x=["rollout"])

    async def response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(response, "127.0.0.1", cluster.port):
        with pytest.raises(ClusterError, match=f"another server listens at http://127.0.0.1:{cluster.port}"):
            await cluster.supervisor.run()
    assert cluster.machines.started == []
    assert cluster.gateway is None
    assert cluster.machines.closed


async def test_what_the_file_requires_and_no_node_has_is_an_error(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(ONE + LEARNER + TRAINER, x=["rollout"])
    with pytest.raises(Unsatisfied, match=r"the group 't' needs 1 nodes .* \(waited 0\.1 s\)"):
        await cluster.supervisor.check()
    assert cluster.machines.closed
