"""Node states derived from a recording: each rule by example, and all rules on random histories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.planning.node_states import Nodes
from scheduler.planning.recorded import BadMetrics, Block, TrainerRecord, read_metrics, slugs_of, timeline_of
from scheduler.planning.timeline import Step, Timeline
from scheduler.policies.staleness_events import BatchReady, Consume, Leased
from scheduler.program.calls import CallDeparted, Closed, Demand, Opened, Placed
from scheduler.program.events import Published, StepCommand, StepResult, UpdateResult
from scheduler.program.nodes import (
    Asleep,
    Claimed,
    Filling,
    Hosted,
    NodeAdded,
    NodeRemoved,
    Released,
    RoleChange,
)
from tests.unit.scheduler.planning.partition import assert_partition
from tests.unit.scheduler.planning.story import arrives, leaves, recorded
from tests.unit.scheduler.program.world import MODEL, World

BOTH = ("train", "rollout")


def states(timeline: Timeline, node: str) -> str:
    """Return `rollout 0-3, idle 3-9`."""
    return ", ".join(f"{i.kind} {i.start_s:g}-{i.end_s:g}" for i in timeline.intervals if i.node == node)


def test_an_engine_that_is_open_but_has_no_call_is_idle() -> None:
    runs = recorded(
        (1, StepCommand("e", "launch", 0)),
        (3, StepResult("e", "open", 0)),
        (4, arrives("a")),
        (4, Placed("a", "e")),
        (5, Placed("b", "e")),
        (6, leaves("a")),
        (7, leaves("b")),
        (8, Placed("c", "e")),
        (9, StepCommand("e", "hold", 1)),
        (10, Demand(left=(CallDeparted("c", 5),))),
        (12, StepResult("e", "open", 1)),
        until=14,
    )
    timeline = timeline_of(runs)
    assert (
        states(timeline, "e")
        == "idle 0-1, switching 1-3, idle 3-4, rollout 4-7, idle 7-8, rollout 8-9, switching 9-12, idle 12-14"
    )
    assert timeline.nodes == ("e",)


def test_a_recording_without_calls_takes_an_open_engine_for_busy() -> None:
    runs = recorded((1, Opened("e", 0)), (4, Closed("e")), (6, Opened("e", 1)), until=8)
    assert states(timeline_of(runs), "e") == "idle 0-1, rollout 1-4, idle 4-6, rollout 6-8"


def test_calls_of_an_engine_that_stops_are_not_its_own_any_more() -> None:
    runs = recorded(
        (0, Opened("e", 0)),
        (1, Placed("a", "e")),
        (2, StepCommand("e", "quarantine", 0)),
        (4, Opened("e", 0)),
        until=6,
    )
    assert states(timeline_of(runs), "e") == "idle 0-1, rollout 1-2, idle 2-6"


def test_a_lent_node_does_what_its_role_is() -> None:
    """The life of a node that has both tags: lent, called back, trained on, lent again."""
    runs = recorded(
        (0, NodeAdded("t0", BOTH)),
        (0, Hosted("e", "t0")),
        (0, RoleChange("t0", "train")),
        (1, Released("t0", MODEL)),
        (1, RoleChange("t0", "switching")),
        (1, StepCommand("e", "wake", 0)),
        (2, StepResult("e", "open", 0)),
        (2, RoleChange("t0", "rollout")),
        (3, Placed("a", "e")),
        (7, Claimed("t0", MODEL)),
        (7, RoleChange("t0", "switching")),
        (8, leaves("a")),
        (8, Asleep("e")),
        (8, RoleChange("t0", "train")),
        (12, RoleChange("t0", "idle")),
        until=13,
    )
    assert states(timeline_of(runs), "t0") == (
        "train 0-1, switching 1-2, idle 2-3, rollout 3-7, switching 7-8, train 8-12, idle 12-13"
    )
    worked = TrainerRecord(
        (Block("idle", 1000.5, 1007), Block("train", 1008, 1010), Block("switching", 1010, 1011))
    )
    timeline = timeline_of(runs, {MODEL: worked})
    assert states(timeline, "t0") == (
        "idle 0-1, switching 1-2, idle 2-3, rollout 3-7, switching 7-8, train 8-10, switching 10-11, idle 11-13"
    )
    quiet = TrainerRecord((Block("train", 1009, 1012.5),))  # it trains on where it did not ask
    assert states(timeline_of(runs, {MODEL: quiet}), "t0").endswith("idle 8-9, train 9-12.5, idle 12.5-13")


def test_a_trainer_without_a_node_is_one() -> None:
    worked = TrainerRecord((Block("idle", 1001, 1003), Block("train", 1003.001, 1006)))
    runs = recorded((0, Opened("e", 0)), (1, Leased(0)), (7, Consume(0)), (8, Leased(1)), until=9)
    timeline = timeline_of(runs, {MODEL: worked})
    assert timeline.nodes == ("e", "trainer")
    assert states(timeline, "trainer") == "idle 0-3.001, train 3.001-6, idle 6-9"
    assert [(step.number, step.end_s) for step in timeline.steps] == [(0, 7.0)]


def test_a_trainer_that_wrote_nothing_down_trains_whole_batches() -> None:
    runs = recorded(
        (1, Leased(0)),
        (3, BatchReady(0)),
        (5, Published(1)),
        (6, UpdateResult(1, True)),
        (6.5, Consume(0)),
        (7, BatchReady(1)),
        (8, Leased(1)),
        (9, Published(2)),
        until=10,
    )
    assert states(timeline_of(runs), "trainer") == (
        "idle 0-3, train 3-5, switching 5-6, idle 6-8, train 8-9, switching 9-10"
    )


def test_filling_events_give_the_same_timeline_as_the_ledgers_own_events() -> None:
    """Older recordings have the ledger's events, and newer ones `Filling`."""

    def filling(batch: int, groups: int, leased: int, trained: int) -> Filling:
        return Filling(MODEL, batch, groups, 2, 0, leased=leased, trained=trained)

    runs = recorded(
        (0, filling(0, 0, -1, -1)),
        (1, filling(0, 1, 0, -1)),
        (3, filling(0, 2, 0, -1)),
        (5, Published(1)),
        (6, UpdateResult(1, True)),
        (6.5, filling(1, 1, 0, 0)),
        (7, filling(1, 2, 0, 0)),
        (8, filling(1, 2, 1, 0)),
        (9, Published(2)),
        until=10,
    )
    timeline = timeline_of(runs)
    assert states(timeline, "trainer") == (
        "idle 0-3, train 3-5, switching 5-6, idle 6-8, train 8-9, switching 9-10"
    )
    assert timeline.steps == (Step(0, 6.5),)


def test_what_was_trained_before_a_recording_is_not_a_step_of_it() -> None:
    after = Filling(MODEL, 5, 1, 2, 0, leased=5, trained=4)
    runs = recorded((1, after), (2, after), (3, replace(after, batch=6, trained=5)), until=4)
    assert [step.number for step in timeline_of(runs).steps] == [5]


def test_a_node_for_training_alone_is_its_trainers() -> None:
    worked = TrainerRecord((Block("train", 1002, 1005),))
    runs = recorded((0, NodeAdded("t0", ("train",))), (0, Hosted("e", "r0")), (1, Opened("e", 0)), until=6)
    timeline = timeline_of(runs, {MODEL: worked})
    assert timeline.nodes == ("r0", "t0")
    assert states(timeline, "t0") == "idle 0-2, train 2-5, idle 5-6"
    assert states(timeline, "r0") == "idle 0-1, rollout 1-6"


def test_the_node_of_a_trainer_that_claimed_none_of_two_is_unknown() -> None:
    added = [(0, NodeAdded(node, ("train",))) for node in ("t0", "t1")]
    runs = recorded(*added, (1, Leased(0)), (2, BatchReady(0)), until=4)
    timeline = timeline_of(runs)
    assert timeline.nodes == ("t0", "t1", "trainer")
    claimed = timeline_of(
        recorded(*added, (1, Claimed("t1", MODEL)), (2, Leased(0)), (2, BatchReady(0)), until=4)
    )
    assert (states(claimed, "t0"), states(claimed, "t1")) == ("idle 0-4", "idle 0-2, train 2-4")


def test_a_gateway_that_starts_again_knows_of_no_engine() -> None:
    first = recorded((1, Opened("e", 0)), until=3)
    second = recorded((1, Opened("e", 0)), until=2)
    for run in second:
        moved = [type(e)(type(e.tag)(e.tag.time + 10**10), *list(_rest(e))) for e in run.entries]
        run.entries[:] = moved
        object.__setattr__(run.header, "start", run.header.start + 10**10)
    assert states(timeline_of([*first, *second]), "e") == "idle 0-1, rollout 1-3, idle 3-11, rollout 11-12"


def _rest(entry: Any) -> list[Any]:
    return [getattr(entry, name) for name in entry.__slots__ if name != "tag"]


def test_the_real_program_of_one_engine_and_one_update() -> None:
    """Without nodes: `World` takes a second for each step, and here is no ledger."""
    world = World().add("a").run(10).publish(1).run(20)
    world.check_replay()
    from scheduler.reactor.reading import read

    runs = read(world.recorded())
    assert states(timeline_of(runs), "a").startswith("switching 0-4, rollout 4-10, switching 10-")


def test_what_a_trainer_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    spans = [["publish", 5.0, 6.0], ["idle", 1.0, 2.0], ["claim", 3.0, 4.0], ["checkpoint", 4.0, 5.0]]
    evaluated = {"time": 7.0, "version": 3, "step": 3, "eval/reward_mean": 0.5, "eval/versions": {"3": 8}}
    trained = {"time": 7.5, "batch": 3, "spans": spans}
    path.write_text("".join(json.dumps(record) + "\n" for record in (evaluated, trained)))
    written = read_metrics(path)
    assert [(b.kind, b.start) for b in written.blocks] == [
        *(("idle", 1.0), ("switching", 3.0)),
        *(("train", 4.0), ("switching", 5.0)),
    ]
    assert [(step.number, step.end_s) for step in written.steps] == [(3, 7.5)]
    path.write_text("[]\n")
    with pytest.raises(BadMetrics, match="line 1"):
        read_metrics(path)


def test_unknown_models_are_refused_by_name() -> None:
    runs = recorded((0, Opened("e", 0)), until=1)
    with pytest.raises(ValueError, match="no model ghost; it has actor"):
        timeline_of(runs, {"ghost": TrainerRecord()})


names = st.sampled_from(["a", "b"])
nodes = st.sampled_from(["t0", "r0"])
happenings = st.one_of(
    st.builds(Opened, names, st.just(0)),
    st.builds(Closed, names),
    st.builds(
        StepCommand,
        names,
        st.sampled_from(["launch", "hold", "stop", "quarantine", "sleep", "wake"]),
        st.just(0),
    ),
    st.builds(StepResult, names, st.sampled_from(["open", "stop", "sleep"]), st.just(0), st.booleans()),
    st.builds(Placed, st.sampled_from("xyz"), names),
    st.builds(leaves, st.sampled_from("xyz")),
    st.builds(NodeAdded, nodes, st.sampled_from([BOTH, ("train",), ("rollout",)])),
    st.builds(NodeRemoved, nodes),
    st.builds(Hosted, names, nodes | st.just("")),
    st.builds(RoleChange, nodes, st.sampled_from(["rollout", "train", "switching", "idle"])),
    st.builds(Claimed, nodes, st.just(MODEL)),
    st.builds(Asleep, names),
    st.builds(Leased, st.integers(0, 3)),
    st.builds(BatchReady, st.integers(0, 3)),
    st.builds(Consume, st.integers(0, 3)),
    st.builds(
        Filling,
        st.just(MODEL),
        st.integers(0, 3),
        st.integers(0, 2),
        st.just(2),
        st.just(0),
        st.just(0),
        st.integers(-1, 3),
        st.integers(-1, 3),
    ),
    st.builds(Published, st.integers(0, 3)),
)
stories = st.lists(st.tuples(st.integers(0, 20), happenings), max_size=40).map(
    lambda found: sorted(found, key=lambda one: one[0])
)
blocks = st.lists(st.integers(995, 1025), unique=True, max_size=6).map(
    lambda at: tuple(Block("train", a, b) for a, b in zip(sorted(at)[::2], sorted(at)[1::2], strict=False))
)


@given(stories, blocks)
@settings(max_examples=150)
def test_every_story_is_a_partition(story: list[tuple[float, Any]], work: tuple[Block, ...]) -> None:
    timeline = timeline_of(recorded(*story, until=21), {MODEL: TrainerRecord(work)} if work else None)
    assert_partition(timeline)
    for seconds in timeline.by_kind().values():
        assert sum(seconds.values()) == pytest.approx(timeline.seconds)


def test_what_a_trainer_wrote_counts_and_not_what_the_ledger_lets_one_guess() -> None:
    runs = recorded(
        (1, Leased(0)),
        (2, BatchReady(0)),
        (4, Published(1)),
        (5, UpdateResult(1, True)),
        (6, Consume(0)),
        until=8,
    )
    worked = TrainerRecord((Block("train", 1001.5, 1003), Block("switching", 1003, 1003.5)))
    assert states(timeline_of(runs, {MODEL: worked}), "trainer") == (
        "idle 0-1.5, train 1.5-3, switching 3-3.5, idle 3.5-8"
    )
    guessed = "idle 0-2, train 2-4, switching 4-5, idle 5-8"
    assert states(timeline_of(runs), "trainer") == guessed
    only_steps = TrainerRecord((), (Step(0, 1006.0),))
    assert states(timeline_of(runs, {MODEL: only_steps}), "trainer") == guessed, "it wrote down no block"


def test_blocks_that_are_nearly_together_are_and_others_are_not() -> None:
    runs = recorded((0, Leased(0)), until=9)
    near = TrainerRecord(
        (Block("train", 1001, 1002), Block("train", 1002.002, 1003), Block("train", 1005, 1006))
    )
    assert (
        states(timeline_of(runs, {MODEL: near}), "trainer")
        == "idle 0-1, train 1-3, idle 3-5, train 5-6, idle 6-9"
    )


def test_steps_are_the_ledgers_and_without_it_the_trainers_and_grow() -> None:
    own = TrainerRecord((), (Step(0, 1002.5),))
    leased: list[tuple[float, Any]] = [(0, Leased(0))]
    assert timeline_of(recorded(*leased, until=9), {MODEL: own}).steps == (Step(0, 2.5),)
    consumed = [*leased, (3, Consume(0)), (3, Consume(1)), (5, Consume(4)), (7, Consume(0))]
    timeline = timeline_of(recorded(*consumed, until=9), {MODEL: own})
    assert timeline.steps == (Step(0, 3.0), Step(4, 5.0))


def test_the_steps_are_those_of_the_model_that_was_trained_most() -> None:
    nodes = Nodes.of([], frozenset())
    nodes.add_steps("few", [Step(0, 5.0)])
    nodes.add_steps("many", [Step(0, 2.0), Step(1, 4.0)])
    assert len(nodes.timeline(0.0, 9.0).steps) == 2


def test_a_node_that_is_lent_samples_though_its_trainer_computes_elsewhere() -> None:
    runs = recorded(
        (0, NodeAdded("t0", BOTH)),
        (0, Hosted("e", "t0")),
        (0, Claimed("t0", MODEL)),
        (1, RoleChange("t0", "rollout")),
        (1, Opened("e", 0)),
        (2, Placed("a", "e")),
        until=7,
    )
    elsewhere = TrainerRecord((Block("train", 1003, 1005),))
    assert states(timeline_of(runs, {MODEL: elsewhere}), "t0") == "idle 0-2, rollout 2-7"


def test_an_engine_on_its_way_is_so_until_it_is_open() -> None:
    """Being closed is a part of it, and a failed probe does not end it."""
    runs = recorded(
        (1, Opened("e", 0)),
        (2, StepCommand("e", "hold", 1)),
        (2.5, Closed("e")),
        (3, StepResult("e", "open", 1, False)),
        (4, StepResult("e", "open", 1)),
        (5, StepCommand("e", "quarantine", 1)),
        until=6,
    )
    assert states(timeline_of(runs), "e") == "idle 0-1, rollout 1-2, switching 2-4, rollout 4-5, idle 5-6"


def test_an_engine_that_is_started_again_elsewhere_has_left_its_node() -> None:
    runs = recorded(
        (0, NodeAdded("r0", ("rollout",))),
        (0, NodeAdded("r1", ("rollout",))),
        (0, Hosted("e", "r0")),
        (1, Opened("e", 0)),
        (2, StepCommand("e", "stop", 0)),
        (3, Hosted("e", "r1")),
        (4, Opened("e", 0)),
        (5, NodeAdded("r0", ("rollout", "more"))),
        until=6,
    )
    timeline = timeline_of(runs)
    assert states(timeline, "r0") == "idle 0-1, rollout 1-2, idle 2-6"
    assert states(timeline, "r1") == "idle 0-4, rollout 4-6"


def test_batches_may_be_whole_in_another_order_and_weights_come_without_a_lease() -> None:
    runs = recorded(
        (1, Published(1)),
        (2, UpdateResult(1, True)),
        (3, BatchReady(1)),
        (4, BatchReady(0)),
        (5, Leased(1)),
        until=6,
    )
    assert states(timeline_of(runs), "trainer") == "idle 0-5, train 5-6"


def test_models_whose_names_make_the_same_slug_are_distinguished() -> None:
    runs = recorded((0, Leased(0)), until=1)
    runs[0].header.settings["models"] = {"a-b": {}, "a_b": {}, "a.b": {}}
    assert slugs_of(runs) == {"a-b": "a_b", "a_b": "a_b_", "a.b": "a_b__"}


def test_a_recording_in_which_nothing_happens_is_refused() -> None:
    with pytest.raises(ValueError, match="no time in it"):
        timeline_of(recorded(until=0))
