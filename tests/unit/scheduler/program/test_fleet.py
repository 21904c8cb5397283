"""The life of engines by example: restarts, patience, removal. Every step takes a second by default."""

from __future__ import annotations

from scheduler.program import ControlProgram
from tests.unit.scheduler.program.world import Outcome, World

FAILS, SILENT = Outcome(ok=False), Outcome(after_s=None)


def test_an_engine_that_dies_is_stopped_and_launched_again() -> None:
    world = World().add("a").run(10)
    world.story()
    assert world.lose("a").run(10).story() == [
        "10 a stop 0",
        "11 a launch 0",
        "12 a label 0",
        "13 a probe 0",
        "14 a open 0",
    ]


def test_restarts_are_forgotten_after_the_window() -> None:
    world = World(fleet={"max_restarts": 1, "window_s": 60}).add("a").run(10)
    world.lose("a").run(60)
    world.story()
    assert world.lose("a").run(1).story() == ["70 a stop 0", "71 a launch 0"]
    assert world.run(9).lose("a").run(1).story()[-1] == "80 a quarantine 0"


def test_an_engine_that_was_given_up_is_tried_again_after_a_while() -> None:
    world = World(fleet={"max_restarts": 0, "revive_s": 30}).add("a").run(10)
    assert world.lose("a").run(40).story()[4:] == [
        "10 a quarantine 0",
        "40 a stop 0",
        "41 a launch 0",
        "42 a label 0",
        "43 a probe 0",
        "44 a open 0",
    ]


def test_the_next_version_tries_it_immediately_and_its_patience_begins_again() -> None:
    world = World(fleet={"max_restarts": 0, "revive_s": 30}).add("a").run(10).lose("a").run(2)
    world.story()
    assert world.publish(1).run(8).story()[:2] == ["12 a stop 1", "13 a launch 1"]
    assert world.lose("a").run(40).story()[:2] == ["20 a quarantine 1", "50 a stop 1"]


def test_an_engine_that_others_start_may_come_late() -> None:
    outcomes = iter([Outcome(ok=False)])
    world = World(
        lambda do: next(outcomes, Outcome()) if do.step == "launch" else Outcome(),
        fleet={"max_restarts": 0, "revive_s": 30, "insist": True},
    )
    story = world.add("a").run(60).story()
    assert story[:2] == ["0 a launch 0", "1 a quarantine 0"]
    assert story[2:4] == ["31 a stop 0", "32 a launch 0"]
    assert story[-1].endswith("a open 0")


def test_an_engine_that_was_never_up_waits_for_the_next_version() -> None:
    world = World(lambda do: FAILS if do.version == 0 else Outcome()).add("a").run(300)
    assert world.story() == ["0 a launch 0", "1 a quarantine 0"]
    assert world.publish(1).run(10).story() == [
        "300 a stop 1",
        "301 a launch 1",
        "302 a label 1",
        "303 a probe 1",
        "304 a open 1",
        "305 version 1 live",
    ]


def test_a_removed_engine_is_drained_stopped_and_forgotten() -> None:
    world = World().add("a").run(10).remove("a").run(100)
    assert world.story()[4:] == ["10 a drain 0", "11 a stop 0"]
    assert world.publish(1).run(10).story() == ["110 version 1 failed"]
    assert world.add("a").run(10).story()[0] == "120 a launch 1"


def test_a_name_is_free_when_its_engine_is_forgotten_and_not_before() -> None:
    world = World().add("a").run(10).remove("a").add("a").run(20)
    assert world.story()[4:] == ["10 a drain 0", "11 a stop 0"]
    assert world.add("a").run(20).story()[0] == "30 a launch 0"


def test_deadlines_of_a_forgotten_engine_do_not_touch_the_next_of_its_name() -> None:
    world = World(lambda do: Outcome(after_s=7 if do.step == "launch" else 1), fleet={"start_s": 8})
    world.add("a").run(1).remove("a").run(3).add("a").run(30)
    assert world.story() == [
        "0 a launch 0",
        "1 a drain 0",
        "2 a stop 0",
        "4 a launch 0",
        "11 a label 0",
        "12 a probe 0",
        "13 a open 0",
    ]


def test_a_paused_engine_sleeps_through_versions_and_comes_back_with_the_newest() -> None:
    world = World().add("a", "b").run(10)
    world.story()
    assert world.pause("a").pause("a").run(5).story() == ["10 a sleep 0"]
    world.publish(1).run(20)
    assert "15 b hold 1" in (story := world.story())
    assert [line for line in story if " a " in line] == []
    assert story[-1] == "23 version 1 live"
    assert world.watch.engines["b"].runs == 1
    assert world.resume("a").run(10).story() == ["35 a wake 1", "36 a label 1", "37 a probe 1", "38 a open 1"]
    world.check_replay()


def test_models_have_fleets_and_updates_of_their_own_whatever_they_are_called() -> None:
    names = ["qwen-3", "qwen.3", "qwen_3"]
    program = ControlProgram({"models": {name: {} for name in names}})
    assert list(program.fleets) == list(program.updates) == names
    assert len({reactor.name for reactor in program.reactors}) == len(program.reactors) == 10
    for name in names:
        theirs = {
            c.target.reactor for c in program.connections if c.source.reactor == program.fleets[name].name
        }
        own = {program.updates[name].name, program.placements[name].name}
        assert own <= theirs <= own | {program.lending.name}
