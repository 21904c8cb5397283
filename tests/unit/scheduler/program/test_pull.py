"""Order `pull` of the weight update by example: which engines are ordered to pull, and what happens without an order."""

from __future__ import annotations

import pytest

from scheduler.program import ControlProgram
from scheduler.program.events import (
    Added,
    EngineLost,
    Published,
    Started,
    StepCommand,
    StepResult,
    UpdateResult,
)
from scheduler.reactor import SECOND, Runtime, VirtualClock
from tests.unit.scheduler.program.world import Outcome, World


class Alone:
    """A fleet that the placement does not know, so that it gives no order to pull. Steps end by hand."""

    def __init__(self, *engines: str) -> None:
        self.program = ControlProgram({"models": {"m": {"update": {"order": "pull"}}}})
        self.fleet, self.update = self.program.fleets["m"], self.program.updates["m"]
        self.clock = VirtualClock()
        self.runtime = Runtime(self.program, self.clock)
        self.pending: dict[str, StepCommand] = {}
        self.holds: list[str] = []
        self.ends: list[UpdateResult] = []
        for reactor in (self.fleet, self.update):
            self.runtime.observe(reactor.commands, self._on_commands)
        self.runtime.observe(self.update.ended, lambda _tag, ended: self.ends.append(ended))
        self.runtime.start()
        self.inject(self.fleet.started, Started(0))
        self.inject(self.update.started, Started(0))
        for engine in engines:
            self.inject(self.fleet.added, Added(engine))
            self.arrives(engine)

    def _on_commands(self, _tag: object, commands: tuple[StepCommand, ...]) -> None:
        for do in commands:
            self.pending[do.engine] = do
            if do.step == "hold":
                self.holds.append(do.engine)

    def inject(self, action: object, value: object) -> None:
        self.runtime.inject(action, value)  # type: ignore[arg-type]
        self.runtime.advance()

    def outcomes(self, engine: str) -> None:
        do = self.pending.pop(engine)
        fleet = do.step in ("launch", "stop")
        self.inject(
            self.fleet.step_result if fleet else self.update.step_result,
            StepResult(engine, do.step, do.version, True),
        )

    def arrives(self, engine: str) -> None:
        """Carry out the engine's orders until it is open."""
        while engine in self.pending:
            self.outcomes(engine)

    def pull(self, *engines: str) -> None:
        """Order engines to pull, in place of the placement."""
        for engine in engines:
            way = self.update._progress.get(engine)
            assert way is not None
        self.runtime._put(self.update.pull, engines, self.runtime.tag.after(0))
        self.runtime.advance()

    def second(self, seconds: float = 1.0) -> None:
        self.runtime.run_until(self.clock.now() + int(seconds * SECOND))


def test_a_version_is_live_as_soon_as_one_engine_runs_it_and_the_others_stay() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    assert fleet.holds == []
    fleet.second()
    assert fleet.holds == ["a"]
    fleet.arrives("a")
    assert [(ended.version, ended.live) for ended in fleet.ends] == [(1, True)]
    fleet.second(30)
    assert fleet.holds == ["a"]


def test_without_the_placement_one_engine_pulls_after_a_second_and_no_other_while_it_is_on_its_way() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.second(10)
    assert fleet.holds == ["a"]


def test_if_the_one_that_pulls_unasked_dies_another_does() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.second()
    fleet.inject(fleet.fleet.lost, EngineLost("a", "it died"))
    fleet.second(2)
    assert fleet.holds == ["a", "b"]


def test_if_the_one_that_pulls_cannot_load_the_version_no_other_tries_before_it_is_back() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.second()
    while fleet.pending["a"].step != "load":
        fleet.outcomes("a")
    fleet.pending.pop("a")
    fleet.inject(fleet.update.step_result, StepResult("a", "load", 1, False, "it cannot be read"))
    fleet.pull("b")
    fleet.second(5)
    assert fleet.holds == ["a"]
    fleet.arrives("a")  # its new process runs the version
    assert [(ended.version, ended.live) for ended in fleet.ends] == [(1, True)]
    fleet.pull("b")
    assert fleet.holds == ["a", "b"]


def test_the_second_of_one_version_is_not_that_of_the_next() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.second(1.5)
    fleet.arrives("a")
    fleet.inject(fleet.update.published, Published(2))
    fleet.second(0.7)
    assert fleet.holds == ["a"]
    fleet.second(0.4)
    assert fleet.holds == ["a", "a"]


def test_an_engine_on_its_way_to_the_last_version_keeps_no_other_from_the_newest() -> None:
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.pull("a", "b")
    fleet.arrives("b")
    assert [(ended.version, ended.live) for ended in fleet.ends] == [(1, True)]
    fleet.inject(fleet.update.published, Published(2))
    fleet.second(1.1)
    assert (fleet.holds, fleet.pending["a"].version) == (["a", "b", "b"], 1)


def test_once_a_version_is_live_no_timer_is_left() -> None:
    """Nor does an engine pull by itself when the one that ran it dies: that is launched again with the newest weights."""
    fleet = Alone("a", "b")
    fleet.inject(fleet.update.published, Published(1))
    fleet.second()
    fleet.arrives("a")
    fleet.second(300)
    assert fleet.runtime.next_time() is None
    fleet.inject(fleet.fleet.lost, EngineLost("a", "it died"))
    fleet.second(5)
    assert fleet.holds == ["a"]


def test_an_ordered_engine_leaves_only_an_older_version_and_only_when_it_is_open() -> None:
    fleet = Alone("a", "b", "c")
    fleet.pull("a")
    assert fleet.holds == []  # there is nothing newer
    fleet.inject(fleet.update.published, Published(1))
    fleet.pull("a")
    fleet.outcomes("a")
    fleet.pull("a")  # it is on its way
    assert (fleet.holds, fleet.pending["a"].step) == (["a"], "abort")
    fleet.arrives("a")
    fleet.pull("a")  # it has come
    fleet.inject(fleet.fleet.lost, EngineLost("b", "it died"))
    fleet.pull("b")  # it is being stopped
    assert fleet.holds == ["a"]
    assert fleet.pending["b"].step == "stop"


def test_an_older_version_fails_although_an_engine_that_did_not_pull_still_runs_it() -> None:
    world = World(update={"order": "pull"}).add("a", "b").publish(1).run(15).publish(2, 1)
    still_one = []
    while len(world.watch.ends) < 3:
        still_one = [name for name, engine in world.watch.engines.items() if engine.runs == 1]
        world.run(1)
    assert [(ended.version, ended.live) for ended in world.watch.ends] == [(1, True), (2, True), (1, False)]
    assert still_one


@pytest.mark.parametrize("wrong", ["load", "probe"])
def test_a_version_that_an_engine_has_contradicted_is_not_live_because_others_sleep(wrong: str) -> None:
    """One engine sleeps on a node that its trainer has claimed; the other cannot load the weights or fails with them."""
    world = World(homes={"a": "t0"}).add("r", "a").claim("t0").run(10)

    def outcome(do: StepCommand) -> Outcome:
        return Outcome(ok=do.version != 1 or do.step not in (wrong, "launch"))

    world.outcome = outcome
    world.publish(1).run(30)
    assert [(ended.version, ended.live) for ended in world.watch.ends] == [(1, False)]
