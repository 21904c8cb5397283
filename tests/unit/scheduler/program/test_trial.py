"""A version that engines fail with, by example: who is at fault, what it costs, and who serves during the trial."""

from __future__ import annotations

import pytest

from scheduler.program.events import Step, StepCommand
from scheduler.program.trial import Trial
from tests.unit.scheduler.program.fleets import but, fleet_of
from tests.unit.scheduler.program.world import Outcome, World


def fails_with(version: int, *steps: Step, engine: str = "", hangs: bool = False) -> World:
    """Engines at version 0, at second 10; those named (all, if none is) cannot do some steps with a version."""
    world = fleet_of("a", "b")
    wrong = Outcome(after_s=None) if hangs else Outcome(ok=False)

    def fails(do: StepCommand) -> bool:
        return do.version == version and do.step in steps and engine in ("", do.engine)

    world.outcome = but(fails, wrong)
    return world


def test_an_engine_that_fails_with_a_version_goes_back_and_no_other_tries_it() -> None:
    world = fails_with(1, "load", "launch").publish(1).run(60)
    assert world.story() == [
        "10 a hold 1",
        "11 a abort 1",
        "12 a settle 1",
        "13 a load 1",
        "14 a stop 1",
        "15 a launch 1",
        "16 a stop 1",
        "17 a launch 0",
        "18 a label 0",
        "19 a probe 0",
        "20 a open 0",
        "21 version 1 bad",
    ]
    (ended,) = world.watch.ends
    assert ended.bad == "a: it cannot (with version 0 it works)"
    world.check_replay()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("steps", [("load", "launch"), ("probe",), ("load", "probe"), ("label",)])
def test_whatever_it_fails_at_it_is_bad_and_no_engine_is_given_up(
    steps: tuple[Step, ...], hangs: bool
) -> None:
    world = fails_with(1, *steps, hangs=hangs).publish(1).run(60)
    story = world.story()
    assert story[-1].endswith("version 1 bad")
    assert not any(" b " in line for line in story)
    assert {engine.runs for engine in world.watch.engines.values()} == {0}


def test_bad_versions_cost_no_restart() -> None:
    """Ten of them in a window in which two restarts are allowed; then the engine dies twice, and is there again."""
    world = World(fleet={"window_s": 1000}).add("a").run(10)
    world.outcome = but(lambda do: 0 < do.version < 11 and do.step in ("load", "launch"), Outcome(ok=False))
    world.publish(*range(1, 11)).run(200)
    assert [bool(ended.bad) for ended in world.watch.ends] == [True] * 10
    world.lose("a").run(20).lose("a").run(20)
    assert world.watch.engines["a"].runs == 0
    assert world.publish(11).run(20).story()[-1].endswith("version 11 live")


def test_an_engine_that_dies_of_a_version_has_its_restart_back() -> None:
    """The cause of its death is unknown until its process fails with the version and runs with the one before."""
    world = World(fleet={"max_restarts": 1}).add("a").run(10)
    world.outcome = but(lambda do: do.version == 1 and do.step == "launch", Outcome(ok=False))
    world.publish(1).run(3).lose("a", "it was killed: out of memory").run(20)
    assert world.story()[-1].endswith("version 1 bad")
    assert world.lose("a").run(20).watch.engines["a"].runs == 0


def test_a_version_that_does_not_reach_engines_is_not_at_fault() -> None:
    world = fleet_of("a", "b")
    away = but(lambda do: do.version == 1 and do.step in ("load", "launch"), Outcome(ok=False, excused=True))
    world.outcome = away
    world.publish(1).run(8)
    assert not world.watch.ends
    world.outcome = lambda _do: Outcome()
    assert world.run(60).story()[-1].endswith("version 1 live")


def test_one_start_that_fails_proves_nothing() -> None:
    """The engine died before its turn; its next process, started with the new version, was killed from outside."""
    world = fleet_of("a").publish(1).lose("a").run(1).lose("a", "it was killed").run(20)
    assert world.story()[-1].endswith("version 1 live")


def test_an_engine_that_fails_with_the_live_version_too_is_at_fault() -> None:
    world = fleet_of("a", "b")
    world.outcome = but(lambda do: do.engine == "a" and do.step in ("load", "launch"), Outcome(ok=False))
    story = world.publish(1).run(90).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 live (a given up)"]
    assert world.watch.engines["b"].runs == 1


def test_a_version_that_one_engine_runs_is_not_bad() -> None:
    world = fleet_of("a", "b")
    broken = but(
        lambda do: do.engine == "b" and do.version == 1 and do.step in ("load", "launch"), Outcome(ok=False)
    )
    world.outcome = broken
    story = world.publish(1).run(80).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 live (b given up)"]
    assert world.watch.engines["a"].runs == 1


def test_an_engine_that_is_removed_while_it_goes_back_proves_nothing() -> None:
    world = fails_with(1, "load", "launch", engine="a").publish(1).run(8)
    assert world.story()[-1] == "18 a label 0"
    story = world.remove("a").run(30).story()
    assert story[:3] == ["18 a drain 1", "18 b hold 1", "19 a stop 1"]
    assert story[-1].endswith("version 1 live")


def test_the_next_version_is_tried_after_a_bad_one() -> None:
    world = fails_with(1, "load", "launch").publish(1, 2).run(60)
    assert [line for line in world.story() if "version" in line] == ["21 version 1 bad", "37 version 2 live"]
    assert {engine.runs for engine in world.watch.engines.values()} == {2}


def test_where_nothing_works_the_version_is_not_called_bad() -> None:
    world = fleet_of("a")
    world.outcome = but(lambda do: do.step in ("load", "launch"), Outcome(ok=False))
    story = world.publish(1).run(60).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 failed (a given up)"]


def test_an_engine_that_is_tried_again_later_finds_the_version_bad_after_all() -> None:
    world = World(fleet={"max_restarts": 0}).add("a").run(10)
    down = but(lambda do: do.step in ("load", "launch"), Outcome(ok=False))
    bad = but(lambda do: do.version == 1 and do.step in ("load", "launch"), Outcome(ok=False))
    world.outcome = lambda do: down(do) if world.now < 30 else bad(do)
    world.publish(1).run(90)
    assert [line.split(" ", 1)[1] for line in world.story() if "version" in line] == [
        "version 1 failed (a given up)",
        "version 1 bad",
    ]
    assert world.watch.engines["a"].runs == 0


@pytest.mark.parametrize("order", ["rolling", "pull"])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_in_every_mode_and_order(mode: str, order: str) -> None:
    world = fleet_of("a", "b", mode=mode, order=order)
    world.outcome = but(lambda do: do.version == 1 and do.step == "probe", Outcome(ok=False))
    story = world.publish(1).run(60).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 bad"]
    assert world.publish(2).run(60).story()[-1].endswith("version 2 live") or order == "pull"
    world.check_replay()


def test_a_failure_is_the_versions_only_if_its_own_process_failed_with_it() -> None:
    trial = Trial(version=3, live=2, began=0)
    assert trial.record_failure("a", "reload", version=3, started=0) == "restart"
    assert trial.record_failure("b", "start", version=3, started=3) == "restart"
    assert trial.launch_version == 3
    assert trial.record_failure("a", "start", version=3, started=3) == "go_back"
    assert trial.launch_version == 2
    assert not trial.record_open("b", 2)
    assert trial.record_failure("a", "start", version=2, started=2) == "engine_at_fault"
    assert not trial.record_open("a", 2)
    assert trial.launch_version == 3
