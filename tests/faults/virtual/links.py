"""Hub and followers: which version sampled a token, and where nothing may begin, whatever becomes of their links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.config.settings import Settings
from headgate.errors import Fenced
from tests.faults.virtual.cluster import ASK_S, LEASE_S, Cluster, Tally
from tests.faults.virtual.network import HEARTBEAT_S
from tests.faults.virtual.processes import Process

MOMENTS = st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0, 4.0, 11.0])
LAGS = st.sampled_from([0.0, 0.0, 0.01, 0.15, 1.0])
ENDS = st.sampled_from([(0.0, 0.0), (0.0, 0.4), (0.4, 0.4), (0.0, 20.0), (0.4, 20.0), (7.5, 20.0)])
"""Virtual seconds until the follower and the hub notice a cut. The hub is never first (docs/topics/cluster.md has the reason)."""
_START_S = 10.0
"""An engine is not back sooner than this after it died."""
GRACE_S = 3.0
"""Virtual seconds that a reply waits for its client to come back."""
FAULTS = st.sampled_from(["none", "cut", "cut", "stall", "coordinator", "coordinator", "engine"])
CALLS = st.tuples(st.integers(0, 3), st.sampled_from([3, 12, 40, 150]), st.sampled_from([False, False, True]))


def settings_of(mode: str, order: str, engines: int) -> Settings:
    urls = [f"http://e{i}" for i in range(engines)]
    engine = {"launch": "external", "urls": urls, "start_s": 60, "stall_s": 600}
    return Settings.parse(
        {
            "models": {"m": {"path": "/nowhere/0"}},
            "engine": engine,
            "update": {"mode": mode, "order": order, "probe": False},
            "queue": {"max_wait_s": 900},
            "store": {"url": "postgresql://nowhere/headgate"},
            "bus": {"url": "redis://nowhere"},
            "cluster": {
                "url": "http://nowhere",
                "key": "the-key-of-the-cluster",
                "lease_s": LEASE_S,
                "peer_timeout_s": ASK_S,
            },
            "calls": {"grace_s": GRACE_S},
            "episodes": {"idle_s": 80_000, "total_s": 80_000},
        }
    )


class LinkMachine(RuleBasedStateMachine):
    """Three processes and two engines."""

    cluster: Cluster | None = None
    tally = Tally()

    @initialize(
        mode=st.sampled_from(["abort", "keep"]),
        order=st.sampled_from(["rolling", "pull"]),
        engines=st.integers(1, 2),
    )
    def start(self, mode: str, order: str, engines: int) -> None:
        self.begin(mode, order, engines, accounts=True)

    def begin(self, mode: str, order: str, engines: int, *, accounts: bool) -> None:
        settings = settings_of(mode, order, engines)
        self.cluster = Cluster(settings, engines, 3, accounts=accounts, tally=self.tally)

    @property
    def c(self) -> Cluster:
        assert self.cluster is not None
        return self.cluster

    def alive(self) -> list[Any]:
        return [p for p in self.c.processes if not p.dead]

    # What agents and the trainer do

    @rule(at=st.integers(0, 3), tokens=st.sampled_from([3, 12, 40, 150]), pinned=st.sampled_from([False, False, True]),
          new=st.booleans())  # fmt: skip
    def call(self, at: int, tokens: int, pinned: bool, new: bool) -> None:
        if not self.alive():
            return
        process = self.alive()[at % len(self.alive())]
        if new or not self.c.open:
            self.c.open_episode()
        if self.c.open:
            episode = list(self.c.open.values())[-1 - at % min(2, len(self.c.open))]
            process.spawn(process.call(episode, tokens, pinned=pinned))
            self.c.loop.settle()

    @precondition(lambda self: self.cluster and self.cluster.coordinator and self.cluster.open)
    @rule(which=st.integers(0, 5))
    def end_episode(self, which: int) -> None:
        self.c.end_episode(list(self.c.open)[which % len(self.c.open)])
        self.c.loop.settle()

    @precondition(lambda self: self.cluster and any(p.runs() for p in self.cluster.processes if not p.dead))
    @rule(which=st.integers(0, 9))
    def client_goes_away(self, which: int) -> None:
        works = [w for p in self.alive() for w in p.works if not w.recorded]
        works[which % len(works)].leave()
        self.c.loop.settle()

    @precondition(lambda self: self.cluster and any(p.runs() for p in self.cluster.processes if not p.dead))
    @rule()
    def clients_come_back(self) -> None:
        for work in [w for p in self.alive() for w in p.works]:
            work.come_back()
        self.c.loop.settle()

    @precondition(lambda self: self.cluster and self.cluster.coordinator)
    @rule()
    def publish(self) -> None:
        self.c.publish()

    @rule(seconds=MOMENTS)
    def advance(self, seconds: float) -> None:
        self.c.loop.advance(seconds)

    # What goes wrong

    @rule(which=st.integers(0, 1), up=LAGS, down=LAGS)
    def links_are_slow(self, which: int, up: float, down: float) -> None:
        if links := self.c.network.live():
            link = links[which % len(links)]
            link.up.lag_s, link.down.lag_s = up, down

    @rule(which=st.integers(0, 1), stalled=st.booleans())
    def a_link_stands_still(self, which: int, stalled: bool) -> None:
        if links := self.c.network.live():
            self.c.faults = True
            links[which % len(links)].stall(stalled)
            self.c.loop.settle()

    @rule(which=st.integers(0, 1), ends=ENDS)
    def a_link_is_cut(self, which: int, ends: tuple[float, float]) -> None:
        if links := self.c.network.live():
            self.c.faults = True
            links[which % len(links)].cut(*ends)
            self.c.loop.settle()

    @rule(
        calls=st.lists(CALLS, min_size=1, max_size=4),
        work=st.sampled_from([0.0, 0.05, 0.3]),
        moment=st.integers(0, 30),
        fault=FAULTS,
        ends=ENDS,
        later=st.integers(0, 30),
        leave=st.sampled_from(["none", "client", "client", "episode"]),
        which=st.integers(0, 3),
    )
    def an_update_is_disturbed(
        self, calls: Any, work: float, moment: int, fault: str, ends: Any, later: int, leave: str, which: int
    ) -> None:
        """Combine other rules in an order that is rare otherwise."""
        for at, tokens, pinned in calls:
            self.call(at, tokens, pinned, new=at % 2 == 0)
        self.advance(0.2)
        for server in self.c.servers:
            server.work_s = work
        if self.c.coordinator is not None:
            self.publish()
        self.advance(moment / 20)
        if fault == "cut":
            self.a_link_is_cut(which, ends)
        elif fault == "stall":
            self.a_link_stands_still(which, True)
        elif fault == "engine":
            self.an_engine_dies(which, reported=which % 2 == 0)
        elif fault == "coordinator" and self.c.coordinator is not None:
            self.the_coordinator_dies(min(ends[0], 4.0))
            self.another_follows()
        self.advance(later / 10)
        if leave == "client" and any(p.runs() for p in self.alive()):
            self.client_goes_away(which)
        elif leave == "episode" and self.c.open and self.c.coordinator is not None:
            self.end_episode(which)

    @rule(which=st.integers(0, 1), arrival=LAGS, stream=LAGS, work=LAGS)
    def engines_are_slow(self, which: int, arrival: float, stream: float, work: float) -> None:
        server = self.c.servers[which % len(self.c.servers)]
        server.arrival_s, server.stream_s, server.work_s = arrival, stream, work

    @rule(which=st.integers(0, 1), reported=st.booleans())
    def an_engine_dies(self, which: int, reported: bool) -> None:
        self.c.faults = True
        server = self.c.servers[which % len(self.c.servers)]
        server.die()
        if reported and self.c.coordinator is not None and self.c.coordinator.control is not None:
            name = f"m-{self.c.servers.index(server)}"
            self.c.loop.call_soon(self.c.coordinator.control.host.report_lost, "m", name, "its process ended")
        self.c.loop.settle()

    @rule(which=st.integers(0, 1))
    def an_engine_comes_back(self, which: int) -> None:
        """Start an engine again, once its health checks have failed: a real one takes longer than that to start."""
        server = self.c.servers[which % len(self.c.servers)]
        if self.c.clock.now - server.died_at > _START_S:
            server.up = True

    @precondition(lambda self: self.cluster and sum(not p.dead for p in self.cluster.processes) > 2)
    @rule(which=st.integers(0, 3))
    def a_follower_dies(self, which: int) -> None:
        followers = [p for p in self.alive() if p is not self.c.coordinator]
        self.kill(followers[which % len(followers)])

    @precondition(lambda self: self.cluster and sum(not p.dead for p in self.cluster.processes) < 3)
    @rule()
    def a_process_starts(self) -> None:
        self.c.add()
        self.c.loop.settle()

    @precondition(lambda self: self.cluster and self.cluster.coordinator)
    @rule(after=st.sampled_from([0.0, 0.4, 4.0]))
    def the_coordinator_dies(self, after: float) -> None:
        assert self.c.coordinator is not None
        for link in self.c.network.live():
            link.cut(after, 0.0)
        self.kill(self.c.coordinator)

    @precondition(lambda self: self.cluster and not self.cluster.coordinator)
    @rule()
    def another_follows(self) -> None:
        if not self.alive():
            self.c.add()
        for _ in range(60):
            if self.c.coordinator is not None:
                return
            self.advance(0.5)
        raise AssertionError("no process has followed the coordinator")

    @precondition(lambda self: self.cluster and len(self.alive()) > 1)
    @rule(which=st.integers(0, 3))
    def a_process_stops(self, which: int) -> None:
        """Stop a process in good order."""
        self.c.faults = True
        self.alive()[which % len(self.alive())].stop()
        self.c.loop.settle()

    @precondition(lambda self: self.cluster and self.cluster.coordinator)
    @rule(seconds=st.sampled_from([1.0, 4.0, 7.0, 12.0]))
    def the_coordinator_is_cut_off_from_its_store(self, seconds: float) -> None:
        """Cuts the coordinator off, perhaps for longer than its lease: then another one follows, and it must end."""
        coordinator = self.c.coordinator
        assert coordinator is not None
        self.c.faults = True
        coordinator.database.cut_off(True)
        self.advance(seconds)
        coordinator.database.cut_off(False)
        self.c.loop.settle()

    def kill(self, process: Any) -> None:
        self.c.faults = True
        self.c.loop.run(process.die(), 60.0)
        for link in self.c.network.live():
            if link.follower == process.name:
                link.cut(0.0, 0.0)

    # What must hold

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.cluster is not None:
            self.cluster.look()

    def teardown(self) -> None:
        if self.cluster is None:
            return
        try:
            self.cluster.look()
            self.it_heals()
        finally:
            self.cluster.close()

    def it_heals(self) -> None:
        """End all faults: then every process must know the same, and every call must end."""
        if self.c.coordinator is None:
            self.another_follows()
        if not all(server.up for server in self.c.servers):
            self.advance(_START_S)
        for server in self.c.servers:
            server.up, server.arrival_s, server.stream_s, server.work_s = True, 0.0, 0.0, 0.0
        for link in self.c.network.live():
            link.stall(False)
            link.up.lag_s = link.down.lag_s = 0.0
        self.advance(HEARTBEAT_S)  # a follower may not know yet that its link is cut
        self.within(120.0, self.all_see_the_same)
        self.c.look()
        self.check_what_is_seen()
        self.c.faults = False
        recorded = len(self.c.turns)
        for at in range(1 + len(self.alive())):
            self.call(at, 3, False, new=at == 0)
        expected = recorded + 1 + len(self.alive())
        self.within(60.0, lambda: len(self.c.turns) == expected and not any(p.runs() for p in self.alive()))
        self.c.look()
        for process in self.alive():
            assert not process.runs(), [w.call.call_id for w in process.works if not w.recorded]
        assert len(self.c.turns) == expected, "calls were refused"
        self.c.check_store()
        assert not any(server.running for server in self.c.servers)
        failed = [failure.get("exception") for failure in self.c.loop.failures]
        assert not [error for error in failed if error and not isinstance(error, Fenced)], failed

    def within(self, seconds: float, holds: Callable[[], bool]) -> None:
        """Advance time until `holds` returns true, or for `seconds`."""
        until = self.c.clock.now + seconds
        while self.c.clock.now < until and not holds():
            self.advance(2.0)

    def seen_by(self, process: Process) -> dict[str, tuple[str, int, int]]:
        """Return the engines, as a process knows them."""
        return {s.name: (s.state, s.version, s.generation) for s in process.pool.slots.values()}

    def all_see_the_same(self) -> bool:
        """Return whether every engine is open, every process knows it, and every call has ended."""
        coordinator = self.c.coordinator
        if coordinator is None or any(process.runs() for process in self.alive()):
            return False
        shown = self.seen_by(coordinator)
        followers = [process for process in self.alive() if process is not coordinator]
        same = all(p.follower.linked.is_set() and self.seen_by(p) == shown for p in followers)
        return same and all(state == "open" for state, _, _ in shown.values())

    def check_what_is_seen(self) -> None:
        """Check the same in detail."""
        coordinator = self.c.coordinator
        assert coordinator is not None
        shown = self.seen_by(coordinator)
        assert all(state == "open" for state, _, _ in shown.values()), coordinator.pool.states()
        for process in self.alive():
            if process is not coordinator:
                assert process.follower.linked.is_set(), process.name
                assert self.seen_by(process) == shown, process.name
            assert not process.runs(), [w.call.call_id for w in process.works if not w.recorded]


@contextmanager
def links(mode: str, *, accounts: bool = True) -> Iterator[LinkMachine]:
    """Three processes and one engine; at the end all must heal."""
    machine = LinkMachine()
    try:
        machine.begin(mode, "rolling", 1, accounts=accounts)
        yield machine
        machine.nothing_is_wrong()
    finally:
        machine.teardown()
