"""Places from tags and capacities, and the errors where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cluster.errors import Unsatisfied
from scheduler.cluster.tags import (
    NODE_LABEL,
    Capacity,
    DiscoveredNode,
    Need,
    NodeGroup,
    NodeInUse,
    assign,
    beyond,
    check_counts,
    last_spare,
    match,
    next_spare,
    rank_counts,
)

ENGINE = Need("engines", frozenset({"rollout"}))
TRAINER = Need("trainer", frozenset({"train"}))


def node(name: str, *tags: str, engines: int | None = None, **has: float) -> NodeInUse:
    """A node of its own group."""
    count = int("rollout" in tags) if engines is None else engines
    capacity = Capacity(has.get("cpus", 8), int(has.get("gpus", 0)), has.get("memory_gb", 64))
    return NodeInUse(name, NodeGroup(name, tags, engines=count), DiscoveredNode(name, {}, capacity))


def nodes_with(*names: str, **labels: str) -> list[DiscoveredNode]:
    """Nodes with these labels."""
    return [DiscoveredNode(name, labels, Capacity(8, 0, 64)) for name in names]


def test_three_topologies_are_three_sets_of_tags() -> None:
    one = node("one", "rollout", "train", engines=2)
    colocated = assign([one], ENGINE, TRAINER)
    assert colocated.roles(one) == "2 engines + trainer rank 0"
    sampler, learner = node("s", "rollout"), node("l", "train")
    disaggregated = assign([sampler, learner], ENGINE, TRAINER)
    assert (disaggregated.roles(sampler), disaggregated.roles(learner)) == ("1 engine", "trainer rank 0")
    both = node("b", "rollout", "train")
    mixed = assign([both, sampler], ENGINE, TRAINER)
    assert (mixed.roles(both), mixed.roles(sampler)) == ("1 engine + trainer rank 0", "1 engine")


def test_ranks_go_to_nodes_that_do_nothing_else_first_and_fill_each() -> None:
    nodes = [node("both", "rollout", "train", gpus=4), node("pure", "train", gpus=4)]
    need = Need("trainer", frozenset({"train"}), Capacity(gpus=2))
    found = assign(nodes, ENGINE, need, ranks=3).ranks
    assert [(place.node.name, place.number, place.devices) for place in found] == [
        ("pure", 0, (0, 1)),
        ("pure", 1, (2, 3)),
        ("both", 0, (0, 1)),
    ]


def test_ranks_that_need_nothing_are_spread_evenly() -> None:
    found = assign([node("e", "rollout"), node("a", "train"), node("b", "train")], ENGINE, TRAINER, ranks=4)
    assert [place.node.name for place in found.ranks] == ["a", "a", "b", "b"]
    odd = assign([node("e", "rollout"), node("a", "train"), node("b", "train")], ENGINE, TRAINER, ranks=3)
    assert [place.node.name for place in odd.ranks] == ["a", "a", "b"]


def test_ranks_become_more_by_whole_nodes() -> None:
    nodes = [
        node("both", "rollout", "train", gpus=8),
        node("pure", "train", gpus=4),
        node("s", "rollout", gpus=8),
    ]
    need = Need("trainer", frozenset({"train"}), Capacity(gpus=1))
    assert rank_counts(nodes, ENGINE, need, 2, 100) == [2, 4, 12]
    assert rank_counts(nodes, ENGINE, need, 4, 11) == [4]
    assert rank_counts(nodes, ENGINE, need, 2, 100, unit=3) == [2, 12]
    assert rank_counts(nodes, ENGINE, TRAINER, 1, 100) == [1, 2], (
        "a rank that needs nothing has a node of its own"
    )


def test_the_scarcest_resource_limits_how_many_fit() -> None:
    both = Capacity(cpus=4, gpus=1, memory_gb=8)
    assert Capacity(cpus=64, gpus=3, memory_gb=1024).holds(both) == 3
    assert Capacity(cpus=7, gpus=8, memory_gb=1024).holds(both) == 1
    assert Capacity().holds(Capacity()) is None
    assert Capacity(8, 2, 16).lacks(both, 2) == "", "it is just enough"
    assert Capacity(8, 1, 15).lacks(both, 2) == "2 gpus (it has 1), 16 memory_gb (it has 15)"


def test_engines_of_a_node_may_have_another_number_of_gpus() -> None:
    large = NodeGroup("large", ("rollout",), engines=2, engine_gpus=4)
    nodes = [
        node("a", "rollout", engines=2, gpus=2),
        NodeInUse("large", large, DiscoveredNode("l", {}, Capacity(8, 8, 64))),
    ]
    found = assign(nodes, Need("engines", frozenset({"rollout"}), Capacity(gpus=1)), None).engines
    assert [place.devices for place in found] == [(0,), (1,), (0, 1, 2, 3), (4, 5, 6, 7)]
    small = NodeInUse("large", large, DiscoveredNode("l", {}, Capacity(8, 7, 64)))
    with pytest.raises(Unsatisfied, match=r"node large: 2 of engines need 8 gpus \(it has 7\)"):
        assign([small], Need("engines", frozenset({"rollout"})), None)


def test_every_engine_of_a_node_has_gpus_of_its_own() -> None:
    need = Need("engines", frozenset({"rollout"}), Capacity(gpus=2))
    found = assign([node("a", "rollout", engines=2, gpus=4)], need, None).engines
    assert [(place.name, place.number, place.devices) for place in found] == [
        ("a-0", 0, (0, 1)),
        ("a-1", 1, (2, 3)),
    ]


@pytest.mark.parametrize(
    ("nodes", "engine", "trainer", "ranks", "message"),
    [
        ([node("a", "train")], ENGINE, None, 1, "no node can run an engine: no node has the tag rollout (a: train)"),
        ([node("a", "rollout")], ENGINE, TRAINER, 1, "no node can run the trainer: no node has the tag train (a: rollout)"),
        ([node("a", "train", engines=1)], ENGINE, None, 1, "node a: engines = 1, but it lacks the tag rollout"),
        (
            [node("a", "rollout", engines=3, gpus=2)],
            Need("engines", frozenset({"rollout"}), Capacity(gpus=1)),
            None,
            1,
            "node a: 3 of engines need 3 gpus (it has 2)",
        ),
        (
            [node("a", "rollout"), node("b", "train", memory_gb=10)],
            ENGINE,
            Need("trainer", frozenset({"train"}), Capacity(memory_gb=8)),
            2,
            "the trainer has 2 ranks, and the nodes tagged train have room for 1 (b: room for 1)",
        ),
        (
            [node("a", "rollout", "h100"), node("b", "train")],
            Need("engines", frozenset({"rollout", "b200"})),
            None,
            1,
            "node a: engines = 1, but it lacks the tag b200",
        ),
        ([], ENGINE, None, 1, "no node exists for the tag rollout"),
    ],
)  # fmt: skip
def test_what_no_node_satisfies_is_named(
    nodes: list[NodeInUse], engine: Need, trainer: Need | None, ranks: int, message: str
) -> None:
    with pytest.raises(Unsatisfied) as raised:
        assign(nodes, engine, trainer, ranks)
    assert message in str(raised.value)


@given(st.data())
def test_no_node_gets_more_than_it_holds_and_every_rank_a_place(data: st.DataObject) -> None:
    tags = st.sets(st.sampled_from(["rollout", "train"])).map(lambda found: tuple(sorted(found)))
    sizes = data.draw(st.lists(st.tuples(tags, st.integers(0, 4)), max_size=5))
    nodes = [node(f"n{i}", *tags, gpus=gpus) for i, (tags, gpus) in enumerate(sizes)]
    need = Need("trainer", frozenset({"train"}), Capacity(gpus=data.draw(st.integers(0, 2))))
    ranks = data.draw(st.integers(1, 6))
    try:
        found = assign(nodes, ENGINE, need, ranks)
    except Unsatisfied:
        return
    assert len(found.ranks) == ranks
    for one in nodes:
        devices = [device for place in found.ranks if place.node == one for device in place.devices]
        assert len(devices) == len(set(devices)) <= one.discovered.capacity.gpus
        assert max(devices, default=-1) < one.discovered.capacity.gpus
    assert all("train" in place.node.tags for place in found.ranks)
    assert all("rollout" in place.node.tags for place in found.engines)


def test_groups_that_ask_for_more_choose_first() -> None:
    groups = [NodeGroup("any", ("rollout",), most=9, count=1), NodeGroup("both", ("rollout", "train"))]
    there = [*nodes_with("x", rollout="true", train="true"), *nodes_with("y", rollout="true")]
    found = {one.name: one.discovered.id for one in match(groups, there, {})}
    assert found == {"both": "x", "any-y": "y"}


def test_a_node_stays_in_its_group_and_late_ones_are_used() -> None:
    groups = [NodeGroup("g", ("rollout",), engines=1, count=1, most=2)]
    first = match(groups, nodes_with("b", rollout="true"), {})
    kept = {one.discovered.id: one.name for one in first}
    later = match(groups, nodes_with("a", "b", "c", rollout="true"), kept)
    assert [one.discovered.id for one in later] == ["b", "a"], "and no more than `most`"
    assert [one.discovered.id for one in match(groups, nodes_with("a", "c", rollout="true"), kept)] == [
        "a",
        "c",
    ]


def test_a_group_that_chooses_first_takes_no_node_from_another() -> None:
    groups = [NodeGroup("few", ("rollout",), zone="z"), NodeGroup("any", ("rollout",))]
    there = nodes_with("x", rollout="true", zone="z")
    assert [one.name for one in match(groups, there, {})] == ["few"]
    assert [one.name for one in match(groups, there, {"x": "any"})] == ["any"]


def test_spare_nodes_are_used_only_when_they_may_be() -> None:
    groups = [NodeGroup("g", ("rollout",), engines=1, count=1, most=9)]
    there = nodes_with("a", "b", "c", rollout="true")
    none = match(groups, there, {}, spare=0)
    assert [one.discovered.id for one in none] == ["a"]
    kept = {one.discovered.id: one.name for one in none}
    assert [one.discovered.id for one in match(groups, there, kept, spare=1)] == ["a", "b"]
    lost = match(groups, nodes_with("b", "c", rollout="true"), kept, spare=0)
    assert [one.discovered.id for one in lost] == ["b"], "a spare takes the place of one that left"


def test_a_label_that_no_node_has_is_named() -> None:
    groups = [NodeGroup("h", ("rollout",), hardware="h100", count=2, most=2)]
    there = [
        *nodes_with("a", rollout="true", hardware="h100"),
        *nodes_with("b", rollout="true", hardware="cpu"),
    ]
    with pytest.raises(
        Unsatisfied, match="needs 2 nodes with the labels rollout=true, hardware=h100, and has 1"
    ):
        check_counts(groups, there, match(groups, there, {}))
    with pytest.raises(
        Unsatisfied, match=r"no node has the label train=true\. All nodes: a \(hardware=h100, rollout"
    ):
        check_counts([NodeGroup("t", ("train",))], there, [])


def test_spare_nodes_that_are_used_already_count() -> None:
    groups = [NodeGroup("g", ("rollout",), count=1, most=9), NodeGroup("h", ("train",), count=0, most=9)]
    there = [*nodes_with("a", "b", "c", rollout="true"), *nodes_with("t", "u", train="true")]
    kept = {one.discovered.id: one.name for one in match(groups, there, {}, spare=1)}
    assert sorted(kept) == ["a", "b"]
    for spare, more in ((1, []), (2, ["c"]), (3, ["c", "t"])):
        found = {one.discovered.id for one in match(groups, there, kept, spare=spare)}
        assert sorted(found) == ["a", "b", *more]


def test_a_full_group_waits_for_no_node() -> None:
    groups = [NodeGroup("g", ("rollout",), count=1, most=2)]
    there = nodes_with("a", "b", "c", rollout="true")
    nodes = match(groups, there, {})
    assert [one.discovered.id for one in nodes] == ["a", "b"]
    check_counts(groups, there, nodes[:1])


def test_what_a_group_has_no_room_for_is_left_to_others() -> None:
    groups = [NodeGroup("g", ("rollout",), count=1, most=2), NodeGroup("h", ("rollout",), count=0, most=9)]
    found = {
        one.discovered.id: one.group.name
        for one in match(groups, nodes_with("a", "b", "c", rollout="true"), {})
    }
    assert found == {"a": "g", "b": "g", "c": "h"}


def test_a_part_of_one_machine_is_found_by_its_name_alone() -> None:
    group = NodeGroup("a", ("rollout",), zone="z", labels={NODE_LABEL: "a"})
    assert group.matches(DiscoveredNode("a", {NODE_LABEL: "a"}, Capacity()))
    assert not group.matches(
        DiscoveredNode("b", {NODE_LABEL: "b", "rollout": "true", "zone": "z"}, Capacity())
    )


def test_a_node_is_in_one_group_although_the_names_of_two_begin_alike() -> None:
    """Later too: a named node may be called as a group is, with something behind it."""
    groups = [
        NodeGroup("gpu-big", ("rollout",), labels={"disk": "fast"}),
        NodeGroup("gpu", ("rollout",), count=1, most=9),
    ]
    there = [*nodes_with("x", rollout="true", disk="fast"), *nodes_with("y", rollout="true")]
    first = match(groups, there, {})
    assert {one.name: one.discovered.id for one in first} == {"gpu-big": "x", "gpu-y": "y"}
    later = match(groups, there, {one.discovered.id: one.name for one in first})
    assert later == first


def test_the_next_spare_node_is_the_next_that_brings_engines() -> None:
    groups = [
        NodeGroup("t", ("train",), zone="z", count=0, most=9),
        NodeGroup("g", ("rollout",), engines=3, most=2),
    ]
    there = [*nodes_with("a", "b", "c", rollout="true"), *nodes_with("t", train="true", zone="z")]
    kept = {one.discovered.id: one.name for one in match(groups, there, {}, spare=0)}
    assert list(kept) == ["a"]
    assert next_spare(groups, there, kept, 0) == (2, 3), "t comes first, and has none"
    full = {one.discovered.id: one.name for one in match(groups, there, kept, spare=2)}
    assert next_spare(groups, there, full, 2) == (0, 0)


def test_only_a_node_that_its_group_does_not_need_is_given_back_the_last_first() -> None:
    need = NodeGroup("need", ("rollout",), engines=1, count=2, most=9)
    spare = NodeGroup("spare", ("rollout",), engines=1, count=0)
    both = NodeGroup("both", ("rollout", "train"), engines=1, count=0)
    none = NodeGroup("none", ("rollout",), count=0)
    nodes = [
        NodeInUse(name, group, *nodes_with(name))
        for name, group in (("a", need), ("b", need), ("c", need), ("s", spare))
    ]
    nodes += [NodeInUse("l", both, *nodes_with("l")), NodeInUse("n", none, *nodes_with("n"))]
    trainer, order = frozenset({"train"}), ["a", "c", "s", "b", "l", "n"]

    def given(nodes: list[NodeInUse]) -> list[str]:
        found = []
        while (last := last_spare(nodes, order, trainer)) is not None:
            found.append(last.name)
            nodes = [node for node in nodes if node != last]
        return found

    assert given(nodes) == ["b", "s"], "l may be the trainer's, and n has no engines"
    assert given([node for node in nodes if node.name != "c"]) == ["s"], "its group has no more than it needs"
    assert beyond(nodes) == 4
    assert beyond(nodes[:1]) == 0
