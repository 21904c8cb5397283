"""The weight update by example: "12 a hold 1" is decided at second 12; every step takes a second by default."""

from __future__ import annotations

from tests.unit.scheduler.program.fleets import but, fleet_of
from tests.unit.scheduler.program.world import Outcome, World


def test_abort_rolling_one_engine_after_the_other() -> None:
    world = fleet_of("a", "b").publish(1).run(20)
    assert world.story() == [
        "10 a hold 1",
        "11 a abort 1",
        "12 a settle 1",
        "13 a load 1",
        "14 a label 1",
        "15 a resume 1",
        "16 a probe 1",
        "17 a open 1",
        "18 b hold 1",
        "19 b abort 1",
        "20 b settle 1",
        "21 b load 1",
        "22 b label 1",
        "23 b resume 1",
        "24 b probe 1",
        "25 b open 1",
        "26 version 1 live",
    ]
    world.check_replay()


def test_an_engine_that_fails_its_probe_is_restarted_with_the_new_weights() -> None:
    world = fleet_of("a", "b")
    world.outcome = but(lambda do: do.step == "probe" and world.now < 20, Outcome(ok=False))
    story = world.publish(1).run(30).story()
    assert story[6:12] == [
        "16 a probe 1",
        "17 a stop 1",
        "18 a launch 1",
        "19 a label 1",
        "20 a probe 1",
        "21 a open 1",
    ]
    assert story[12] == "22 b hold 1"
    assert story[-1] == "30 version 1 live"


def test_a_version_that_no_engine_loads_fails_and_can_be_published_again() -> None:
    world = fleet_of("a")
    world.outcome = but(lambda do: do.step == "load" or do.step == "launch", Outcome(ok=False))
    story = world.publish(1).run(40).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 failed (a given up)"]
    world.outcome = lambda do: Outcome()
    story = world.publish(1).run(10).story()
    assert [line.split(" ", 1)[1] for line in story] == [
        "a stop 1",
        "a launch 1",
        "a label 1",
        "a probe 1",
        "a open 1",
        "version 1 live",
    ]


def test_a_failed_version_whose_engine_came_back_is_live_immediately_when_published_again() -> None:
    world = World(fleet={"max_restarts": 0}).add("a").run(10)
    world.outcome = but(lambda do: do.step == "probe" and world.now < 40, Outcome(ok=False))
    world.publish(1).run(90)
    assert world.watch.engines["a"].runs == 1
    world.story()
    assert world.publish(1).run(1).story() == ["100 version 1 live"]


def test_an_update_survives_the_engine_that_cannot_follow() -> None:
    world = fleet_of("a", "b")
    world.outcome = but(lambda do: do.engine == "a" and do.step == "probe", Outcome(ok=False))
    story = world.publish(1).run(60).story()
    assert [line.split(" ", 1)[1] for line in story if "version" in line] == ["version 1 live (a given up)"]
    assert world.watch.engines["b"].runs == 1


def test_a_version_older_than_the_last_fails_at_once() -> None:
    world = fleet_of("a").publish(2).run(20)
    world.story()
    assert world.publish(1, 3).run(20).story()[0] == "30 version 1 failed"
    assert [ended.version for ended in world.watch.ends] == [2, 1, 3]


def test_without_an_engine_a_version_fails_at_once_and_the_next_engine_starts_with_it() -> None:
    world = World().publish(1).run(1)
    assert world.story() == ["0 version 1 failed"]
    assert world.add("a").run(1).story()[0] == "1 a launch 1"


def test_a_version_published_while_the_first_engine_is_launched_waits_for_it() -> None:
    story = World().add("a").publish(1).run(20).story()
    assert story[:5] == ["0 a launch 0", "1 a label 0", "2 a probe 0", "3 a open 0", "4 a hold 1"]
    assert story[-1] == "12 version 1 live"


def test_an_engine_added_before_an_update_does_not_stay_behind() -> None:
    """The engine was launched with version 0 and comes up long after the others run version 1."""
    world = fleet_of("a")
    world.outcome = but(lambda do: do.step == "launch", Outcome(after_s=7))
    story = world.add("b").publish(1).run(40).story()
    assert "17 b label 0" in story
    assert "20 b hold 1" in story
    assert story[-1] == "28 version 1 live"


def test_an_engine_that_is_removed_on_its_way_delays_no_other() -> None:
    story = fleet_of("a", "b").publish(1).run(3).remove("a").run(20).story()
    assert story[3:6] == ["13 a load 1", "13 a drain 1", "13 b hold 1"]
    assert story[-1] == "21 version 1 live"


def test_an_engine_that_dies_of_the_new_weights_is_back_before_the_next_is_held() -> None:
    world = fleet_of("a", "b", "c").publish(1).run(8)
    assert world.story()[-1] == "18 b hold 1"
    assert world.watch.engines["a"].runs == 1
    world.outcome = but(lambda do: do.step == "launch", Outcome(after_s=7))
    story = world.lose("a").run(30).story()
    assert "25 b open 1" in story
    assert "28 a open 1" in story
    assert next(line for line in story if " c " in line) == "29 c hold 1"


def test_an_engine_that_is_tried_again_during_an_update_is_waited_for() -> None:
    """The other one is given up at 44, when this one, given up at 11, is on its way again."""
    world = World(fleet={"max_restarts": 0, "revive_s": 30}, update={"hold_s": 31}).add("a", "b").run(10)
    world.outcome = but(lambda do: do.engine == "b" and do.step == "settle", Outcome(after_s=None))
    story = world.publish(1).run(1).lose("a").run(50).story()
    assert story[-6:] == [
        "42 a launch 1",
        "43 a label 1",
        "44 a probe 1",
        "44 b quarantine 1",
        "45 a open 1",
        "46 version 1 live (a, b given up)",
    ]


def test_the_deadline_of_a_step_is_not_that_of_the_same_step_later() -> None:
    """Its process died in the middle of `label` (3 s); the deadline of that passes while the next process is at `label`."""
    world = World(lambda do: Outcome(after_s=2 if do.step == "label" else 1))
    story = world.add("a").run(1).lose("a").run(10).story()
    assert story[1:5] == ["1 a label 0", "1 a stop 0", "2 a launch 0", "3 a label 0"]
    assert story[5:] == ["5 a probe 0", "6 a open 0"]


def test_the_deadline_of_a_removed_engine_is_not_that_of_the_next_of_its_name() -> None:
    world = World(lambda do: Outcome(after_s={"label": 2, "launch": 0}.get(do.step, 1)))
    story = world.add("a").run(0).remove("a").run(2).add("a").run(10).story()
    assert story[1:4] == ["0 a label 0", "0 a drain 0", "1 a stop 0"]
    assert story[4:] == ["2 a launch 0", "2 a label 0", "4 a probe 0", "5 a open 0"]
