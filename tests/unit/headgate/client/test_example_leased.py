"""What the adapters of other trainers lease (`examples/leased.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from examples.leased import Member, lease
from headgate.client import Feed, Row, rows_of
from headgate.types import Episode, Group, Node
from tests.unit.trainer.trees import prompt, sampled


class Leased:
    """A batch, and the feed that gives it."""

    number, parent = 3, 3

    def __init__(self, *groups: Group) -> None:
        self.groups = groups
        self.returned: list[str] = []

    def batch(self) -> Leased:
        return self

    def rows(self) -> list[Row]:
        return list(rows_of(self.groups))

    def nack(self, reason: str) -> None:
        self.returned.append(reason)


def of(leased: Leased, live: int = 3, temperature: float = 1.0) -> Sequence[Member]:
    return lease(cast(Feed, leased), live, temperature, "a trainer")[1]


def episode(name: str, *more: Node, reward: float = 1.0) -> Episode:
    return Episode(name, reward, (prompt(0, -1, 0, [1, 2]), *more))


def whole(name: str, **given: Any) -> Episode:
    return episode(name, sampled(1, 0, 2, [3, 4], **given))


def test_every_episode_counts_and_only_paths_that_train_something_are_rows() -> None:
    branched = episode(
        "branched",
        sampled(1, 0, 2, [3, 4]),
        prompt(2, 1, 2, [5]),
        sampled(3, 2, 1, [6]),
        prompt(4, 1, 1, [8]),
        sampled(5, 4, 1, [9]),
    )
    masked = whole("masked", mask_reason="constrained")
    short = Group("short", "task", 3, (branched,))
    full = Group("full", "task", 3, (whole("whole"), masked, Episode("no calls", 0.25, ())))
    leased = Leased(short, full)
    found = [
        (m.group_id, m.number, m.reward, len(m.rows), sum(int(r.train.sum()) for r in m.rows))
        for m in of(leased)
    ]
    assert found == [
        ("short", 0, 1.0, 2, 4),
        ("full", 0, 1.0, 1, 2),
        ("full", 1, 1.0, 1, 0),
        ("full", 2, 0.25, 1, 0),
    ]
    assert not leased.returned


@pytest.mark.parametrize(
    ("leased", "given", "says"),
    [
        (
            Leased(Group("g", "t", 3, (whole("e"),))),
            {"live": 2},
            "a trainer holds version 2, and version 3 is live",
        ),
        (
            Leased(Group("g", "t", 3, (whole("e", temperature=0.5),))),
            {},
            "sampled at temperature 0.5, and a trainer's is 1",
        ),
        (
            Leased(Group("g", "t", 3, (Episode("none", 0.0, ()),))),
            {},
            "no episode of batch 3 has a sampled token",
        ),
    ],
)
def test_a_batch_that_would_be_trained_wrongly_is_given_back(
    leased: Leased, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        of(leased, **given)
    assert leased.returned == [str(caught.value)]
