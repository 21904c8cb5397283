"""The token tree held against a naive one: a list of whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.trajectories.tree import ROOT, START, TokenTree, TreePosition
from headgate.types import Node

NO_IDS = np.empty(0, np.int32)
NO_LOGPROBS = np.empty(0, np.float32)
NO_FLAGS = np.empty(0, np.uint8)

sequence = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def array(ids: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)


def hang(
    tree: TokenTree, place: TreePosition, ids: tuple[int, ...] | list[int], *, sampled: bool = False
) -> TreePosition:
    """Add ids after a place."""
    node = Node(*(len(tree.nodes), place.node, place.at, sampled, array(ids), NO_LOGPROBS, NO_IDS, NO_FLAGS))
    return tree.add(node)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


@given(st.lists(sequence, max_size=12), sequence)
def test_find_is_the_longest_prefix_that_was_ever_added(
    sequences: list[tuple[int, ...]], wanted: tuple[int, ...]
) -> None:
    tree, known = TokenTree(), set()
    for ids in sequences:
        place = tree.find(array(ids))
        assert place.length == max((common(ids, other) for other in known), default=0)
        assert tuple(tree.path(place)) == ids[: place.length]
        if place.length < len(ids):
            end = hang(tree, place, ids[place.length :])
            assert end.length == len(ids)
            assert tuple(tree.path(end)) == ids
        known.add(ids)
    assert tree.find(array(wanted)).length == max((common(wanted, other) for other in known), default=0)
    prefixes = {ids[:k] for ids in known for k in range(1, len(ids) + 1)}
    assert sum(len(node.ids) for node in tree.nodes) == len(prefixes), "a shared prefix is stored once"


@given(st.lists(st.tuples(sequence, sequence), max_size=8))
def test_sampled_turns_are_always_new_nodes_and_every_path_is_exact(
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    tree, ends = TokenTree(), []
    for prompt, turn in calls:
        place = tree.find(array(prompt))
        if place.length < len(prompt):
            place = hang(tree, place, prompt[place.length :])
        ends.append((hang(tree, place, turn, sampled=True), prompt + turn))
    for end, ids in ends:
        assert tuple(tree.path(end)) == ids
        assert end.length == len(ids)
        found = tree.find(array(ids))
        assert tuple(tree.path(found)) == ids
    assert sum(node.sampled for node in tree.nodes) == len(calls)


def test_a_branch_in_the_middle_of_a_node_splits_nothing() -> None:
    tree = TokenTree()
    hang(tree, START, [1, 2, 3, 4])
    place = tree.find(array([1, 2, 9]))
    assert place == TreePosition(0, 2, 2)
    end = hang(tree, place, [9, 9])
    assert tree.path(end).tolist() == [1, 2, 9, 9]
    assert [node.ids.tolist() for node in tree.nodes] == [[1, 2, 3, 4], [9, 9]]
    assert (tree.nodes[1].parent, tree.nodes[1].at) == (0, 2)


def test_a_tree_read_back_from_its_nodes_finds_the_same_places() -> None:
    tree = TokenTree()
    first = hang(tree, START, [1, 2, 3])
    hang(tree, first, [4, 5], sampled=True)
    hang(tree, tree.find(array([1, 2])), [7])
    again = TokenTree(tree.nodes)
    for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 7], [1, 2], [9], []):
        assert again.find(array(ids)) == tree.find(array(ids))


@pytest.mark.parametrize(("index", "parent", "at"), [(1, ROOT, 0), (0, 0, 0), (0, -2, 0)])
def test_a_node_that_hangs_nowhere_is_refused(index: int, parent: int, at: int) -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        TokenTree().add(Node(index, parent, at, False, array([1]), NO_LOGPROBS, NO_IDS, NO_FLAGS))


def test_a_node_outside_its_parent_is_refused() -> None:
    tree = TokenTree()
    hang(tree, START, [1, 2])
    for at in (0, 2):
        assert hang(TokenTree(tree.nodes), TreePosition(0, at, at), [1]).length == at + 1
    with pytest.raises(ValueError, match="outside its parent"):
        tree.add(Node(1, 0, 3, False, array([1]), NO_LOGPROBS, NO_IDS, NO_FLAGS))
