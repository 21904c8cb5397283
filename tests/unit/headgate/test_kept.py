"""What truncated distributions kept: its packed form, parts of it, and which reports of an engine are whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headgate.arrow import groups_from_arrow, groups_to_arrow
from headgate.client.rows import rows_of
from headgate.kept import UNKNOWN, Kept, kept_of
from headgate.types import Episode, Group, TokenFlag
from tests.unit.trainer.trees import prompt, sampled

SETS = {0: (5, 2), 2: (7,), 3: (1, 9, 4)}


def test_sets_are_packed_cut_and_padded() -> None:
    kept = Kept.of(SETS, 4)
    assert kept.padded().tolist() == [[5, 2, 2], [UNKNOWN] * 3, [7, 7, 7], [1, 9, 4]]
    again = Kept.unpacked(kept.packed(), 4)
    assert again.padded().tolist() == kept.padded().tolist()
    assert kept.at(np.array([False, True, True, True])).padded().tolist() == [
        [UNKNOWN] * 3,
        [7, 7, 7],
        [1, 9, 4],
    ]
    assert Kept.joined([Kept.none(1), kept.at(kept.counts == 1)]).padded().tolist() == [[UNKNOWN], [7]]
    with pytest.raises(ValueError, match="not the kept tokens of 3 tokens"):
        Kept.unpacked(kept.packed(), 3)


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ({3: 0.75, 8: 0.25, 5: 0.0}, (3, 8)),
        ({3: 0.75, 8: 0.25}, (3, 8)),  # as many as were requested, and all that were kept
        ({3: 0.7, 8: 0.2}, ()),  # more were kept
        ({8: 1.0}, ()),  # not the token's own distribution
    ],
)
def test_a_set_is_whole_if_its_probabilities_add_up_to_one(
    chances: dict[int, float], expected: tuple[int, ...]
) -> None:
    reported = [(token, math.log(chance) if chance else -9999.0) for token, chance in chances.items()]
    assert kept_of(3, reported) == expected


def test_sets_travel_and_readers_that_do_not_know_them_mask_their_tokens() -> None:
    turn = replace(
        sampled(1, 0, 3, [5, 6, 7, 9], flags=[0, TokenFlag.TRUNCATED, 0, 0]), kept=Kept.of(SETS, 4)
    )
    group = Group("g", "t", 0, (Episode("e", 1.0, (prompt(0, -1, 0, [1, 2, 3]), turn)),))
    table = groups_to_arrow([group])
    for known, flags in ((table, [0, 2, 0, 0]), (table.drop_columns("kept_tokens"), [2, 2, 2, 2])):
        (read,) = groups_from_arrow(known)
        assert read.episodes[0].nodes[1].flags.tolist() == flags
        (row,) = rows_of([read])
        assert not row.train.any()
        assert row.masked["truncated"].sum() == 4
    (read,) = groups_from_arrow(table)
    assert read.episodes[0].nodes[1].kept.padded().tolist() == Kept.of(SETS, 4).padded().tolist()  # type: ignore[union-attr]
