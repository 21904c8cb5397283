"""Rows of NumPy arrays from token trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from headgate.client import rows_of
from headgate.types import Episode, Group, ImageSpan, TokenFlag
from tests.unit.trainer.trees import prompt, sampled


def group_of(*episodes: Episode) -> Group:
    return Group("g", "task", 3, episodes)


BRANCHED = Episode(
    "e",
    0.5,
    (
        prompt(0, -1, 0, [1, 2]),
        sampled(1, 0, 2, [3, 4], logprob=-0.5, version=3, temperature=0.7),
        prompt(2, 1, 2, [5]),
        sampled(3, 2, 1, [6, 7], version=4, flags=[0, TokenFlag.LATE]),
        prompt(4, 1, 1, [8]),
        sampled(5, 4, 1, [9], temperature=0.0, flags=[TokenFlag.GREEDY]),
    ),
)


def test_each_path_is_a_row_and_each_token_is_trained_once_or_has_a_reason() -> None:
    first, second = rows_of([group_of(BRANCHED)])
    assert first.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (first.prompt_ids.tolist(), first.completion_ids.tolist()) == ([1, 2], [3, 4, 5, 6, 7])
    assert first.sampled.tolist() == [False, False, True, True, False, True, True]
    assert first.train.tolist() == [False, False, True, True, False, True, False]
    assert {reason: mask.nonzero()[0].tolist() for reason, mask in first.masked.items()} == {"late": [6]}
    assert first.versions.tolist() == [-1, -1, 3, 3, -1, 4, 4]
    assert first.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -1, -1]
    np.testing.assert_array_equal(first.temperature, np.float32([1, 1, 0.7, 0.7, 1, 1, 1]))
    assert second.ids.tolist() == [1, 2, 3, 8, 9]
    assert {reason: mask.nonzero()[0].tolist() for reason, mask in second.masked.items()} == {
        "in_earlier_row": [2],
        "greedy": [4],
    }
    assert second.temperature.tolist() == [1] * 5, "no logits are divided by the 0 of a greedy token"
    assert (second.branch, second.reward, second.episode_id, second.group_id) == (1, 0.5, "e", "g")


def test_the_newest_path_has_all_of_its_tokens() -> None:
    (row,) = rows_of([group_of(BRANCHED)], "newest")
    assert (row.ids.tolist(), row.branch) == ([1, 2, 3, 8, 9], 1)
    assert row.train.tolist() == [False, False, True, False, False]


def test_an_episode_without_calls_has_no_row_and_images_are_not_trained() -> None:
    image = replace(BRANCHED.nodes[0], images=(ImageSpan("0" * 64, 0, 1),))
    pictured = replace(BRANCHED, nodes=(image, *BRANCHED.nodes[1:]))
    rows = list(rows_of([group_of(Episode("none", 0.0, ()), pictured)]))
    assert Counter(row.episode_id for row in rows) == {"e": 2}
    assert not any(row.train.any() for row in rows)
    assert set(rows[0].masked) == {"images_unseen"}
