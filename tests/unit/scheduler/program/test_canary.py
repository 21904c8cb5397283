"""A version on trial: which engines load it, which calls they get, and what follows from either end."""

from __future__ import annotations

import pytest

from scheduler.program import ControlProgram
from scheduler.program.calls import Arrived, Closed, Demand, Opened, Placed
from scheduler.program.events import (
    Added,
    Canary,
    EngineLost,
    Published,
    Started,
    StepCommand,
    StepResult,
    TrialEnded,
    UpdateResult,
)
from scheduler.reactor import Runtime, VirtualClock


class Trial:
    """Three engines at version 0, of which `a` tries version 1. A step succeeds when a test lets it."""

    def __init__(self, *, begin: bool = True) -> None:
        self.program = ControlProgram({"models": {"m": {"update": {"order": "pull"}}}})
        self.fleet, self.update = self.program.fleets["m"], self.program.updates["m"]
        self.placement = self.program.placements["m"]
        self.runtime = Runtime(self.program, VirtualClock())
        self.pending: dict[str, StepCommand] = {}
        self.versions: dict[str, int] = {}
        self.placed: dict[str, str] = {}
        self.ends: list[UpdateResult] = []
        for reactor in (self.fleet, self.update):
            self.runtime.observe(reactor.commands, self._on_commands)
        self.runtime.observe(self.update.ended, lambda _tag, ended: self.ends.append(ended))
        self.runtime.observe(self.placement.placed, self._on_placed)
        self.runtime.start()
        for reactor in (self.fleet, self.update, self.placement):
            self.inject(reactor.started, Started(0))
        for engine in "abc":
            self.inject(self.fleet.added, Added(engine))
        self.settle()
        if begin:
            self.inject(self.update.published, Published(1, Canary(0, ("a",))))
            self.settle()

    def _on_commands(self, _tag: object, commands: tuple[StepCommand, ...]) -> None:
        self.pending |= {command.engine: command for command in commands}

    def _on_placed(self, _tag: object, placed: tuple[Placed, ...]) -> None:
        self.placed |= {one.call: one.engine for one in placed}

    def inject(self, action: object, value: object) -> None:
        self.runtime.inject(action, value)  # type: ignore[arg-type]
        self.runtime.advance()

    def settle(self) -> None:
        """Let every step succeed, until none is left."""
        while self.pending:
            engine, do = self.pending.popitem()
            of_fleet = do.step in ("launch", "stop")
            if do.step == "open":
                self.versions[engine] = do.version
                self.inject(self.placement.opened, Opened(engine, do.version))
            elif do.step in ("hold", "stop"):
                self.inject(self.placement.closed, Closed(engine))
            reactor = self.fleet if of_fleet else self.update
            self.inject(reactor.step_result, StepResult(engine, do.step, do.version))

    def arrive(self, call: str, version: int) -> str | None:
        """Return the engine of a call of this `min_version`; None: it waits."""
        self.inject(self.placement.demand, Demand(arrived=(Arrived(call, version, 10),)))
        return self.placed.get(call)

    def end(self, *, promoted: bool) -> None:
        self.inject(self.update.trial_ended, TrialEnded(1, promoted))


def test_only_the_engines_of_the_trial_load_the_version_and_get_its_calls() -> None:
    trial = Trial()
    assert trial.versions == {"a": 1, "b": 0, "c": 0}
    assert [(ended.version, ended.live) for ended in trial.ends] == [(1, True)]
    assert {trial.arrive(f"new {n}", 1) for n in range(9)} == {"a"}
    assert {trial.arrive(f"old {n}", 0) for n in range(9)} == {"b", "c"}


@pytest.mark.parametrize("lost", ["a", "b"])
def test_an_engine_that_dies_returns_with_its_version(lost: str) -> None:
    trial = Trial()
    trial.inject(trial.placement.closed, Closed(lost))
    trial.inject(trial.fleet.lost, EngineLost(lost, "it died"))
    trial.settle()
    assert trial.versions == {"a": 1, "b": 0, "c": 0}


def test_calls_of_the_version_wait_for_its_engine_and_stop_no_others() -> None:
    trial = Trial()
    trial.inject(trial.placement.closed, Closed("a"))
    assert trial.arrive("new", 1) is None
    assert trial.arrive("old", 0) in ("b", "c")
    for engine in "bc":
        trial.inject(trial.placement.closed, Closed(engine))
    trial.inject(trial.placement.opened, Opened("a", 1))
    assert trial.placed["new"] == "a"
    assert trial.arrive("older", 0) is None
    assert trial.arrive("newer", 1) == "a"


def test_a_promoted_version_is_pulled_by_the_others() -> None:
    trial = Trial()
    trial.end(promoted=True)
    trial.settle()
    assert trial.versions["a"] == 1
    assert 1 in (trial.versions["b"], trial.versions["c"])
    assert trial.arrive("old", 0) is not None


def test_a_returned_version_leaves_its_engines_and_gets_no_call_in_between() -> None:
    trial = Trial()
    trial.end(promoted=False)
    assert (trial.pending["a"].step, trial.pending["a"].version) == ("hold", 0)
    assert {trial.arrive(f"old {n}", 0) for n in range(9)} == {"b", "c"}
    trial.settle()
    assert trial.versions == {"a": 0, "b": 0, "c": 0}
    trial.inject(trial.fleet.lost, EngineLost("a", "it died"))
    trial.settle()
    assert trial.versions["a"] == 0


def test_an_engine_that_is_starting_with_a_returned_version_starts_over() -> None:
    trial = Trial()
    trial.inject(trial.placement.closed, Closed("a"))
    trial.inject(trial.fleet.lost, EngineLost("a", "it died"))
    while trial.pending["a"].step != "launch":
        do = trial.pending.pop("a")
        trial.inject(trial.fleet.step_result, StepResult("a", do.step, do.version))
    assert trial.pending["a"].version == 1
    trial.end(promoted=False)
    trial.settle()
    assert trial.versions["a"] == 0


def test_the_next_version_waits_for_the_end_of_the_trial() -> None:
    trial = Trial()
    trial.inject(trial.update.published, Published(2, Canary(0, ("b",))))
    trial.settle()
    assert trial.versions == {"a": 1, "b": 0, "c": 0}
    trial.end(promoted=False)
    trial.settle()
    assert trial.versions == {"a": 0, "b": 2, "c": 0}


def test_a_version_with_which_the_engine_of_the_trial_fails_is_bad_for_all() -> None:
    trial = Trial(begin=False)
    trial.inject(trial.update.published, Published(1, Canary(0, ("a",))))
    while trial.pending:
        engine, do = trial.pending.popitem()
        if do.step == "open":
            trial.versions[engine] = do.version
        reactor = trial.fleet if do.step in ("launch", "stop") else trial.update
        ok = not (do.version == 1 and do.step in ("load", "probe"))
        trial.inject(reactor.step_result, StepResult(engine, do.step, do.version, ok, "" if ok else "NaN"))
    assert [(ended.live, bool(ended.bad)) for ended in trial.ends] == [(False, True)]
    assert trial.versions == {"a": 0, "b": 0, "c": 0}
    trial.inject(trial.placement.opened, Opened("a", 0))
    assert {trial.arrive(f"old {n}", 0) for n in range(9)} >= {"a"}
