"""Conversations of an episode by their turns: which turn goes on with which, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.trajectories.lineage import lineages
from headgate.types import Node

Row = tuple[int, int, bool, int]
"""A node's parent, where it branches off, whether it was sampled, and its number of tokens."""


def nodes_of(rows: list[Row]) -> list[Node]:
    found = []
    for index, (parent, at, sampled, tokens) in enumerate(rows):
        own = tokens if sampled else 0
        arrays = np.zeros(own, np.float32), np.zeros(own, np.int32), np.zeros(own, np.uint8)
        found.append(Node(index, parent, at, sampled, np.arange(tokens, dtype=np.int32), *arrays))
    return found


ROOT = (-1, 0, False, 4)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([ROOT, (0, 4, True, 3), (1, 3, False, 2), (2, 2, True, 3)], {1: 0, 3: 0}, id="goes on"),
        pytest.param([(-1, 0, True, 3), (0, 3, True, 2)], {0: 0, 1: 0}, id="goes on with a turn without a prompt"),
        pytest.param(
            [ROOT, (0, 4, True, 3), (1, 2, False, 2), (2, 2, True, 3)], {1: 0, 3: 1}, id="leaves the turn before its end"
        ),
        pytest.param([ROOT, (0, 4, True, 3), (0, 4, True, 5)], {1: 0, 2: 1}, id="two answers to one prompt"),
        pytest.param([ROOT, (0, 4, True, 3), ROOT, (2, 4, True, 3)], {1: 0, 3: 1}, id="another prompt"),
        pytest.param(
            [ROOT, (0, 4, True, 3), (1, 3, False, 2), (2, 2, True, 3), (1, 3, False, 1), (4, 1, True, 3)],
            {1: 0, 3: 0, 5: 1},
            id="another turn went on first",
        ),
        pytest.param(
            [ROOT, (0, 4, True, 3), (1, 2, False, 2), (2, 2, True, 3), (1, 3, False, 1), (4, 1, True, 3)],
            {1: 0, 3: 1, 5: 0},
            id="the first conversation goes on after a second has begun",
        ),
    ],
)  # fmt: skip
def test_a_turn_goes_on_with_the_one_whose_tokens_its_prompt_has(
    rows: list[Row], expected: dict[int, int]
) -> None:
    assert lineages(nodes_of(rows)) == expected
