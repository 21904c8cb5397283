"""Redundant groups and members, by traces that were worked out by hand: who is trained, who is surplus, who has no room."""

from __future__ import annotations

import pytest

from headgate.rewards import ROUNDING, SIZE
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BatchReady,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    Grading,
    GroupDropped,
    Join,
    MemberDropped,
    Moved,
    Occupied,
    Refuse,
    Reward,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LedgerSettings
from tests.unit.scheduler.policies.races import lost, play, solos, table

# Members


def test_the_first_members_to_be_rewarded_are_trained() -> None:
    book = play(LedgerSettings(0, 1, spare_members=1), *(Join("g", e, 2) for e in "abc"))
    assert book.apply(Join("g", "d", 2)) == [Refuse("d", "group_full")]
    assert book.apply(Finish("b")) == [Grading("b")]
    assert book.apply(Reward("a")) == []
    assert book.apply(Reward("c")) == [
        MemberDropped("b", "surplus"),
        AbortEpisode("b", "surplus"),
        Occupied("g", 0, 0),
        BatchReady(0),
    ]
    assert book.apply(Reward("b")) == [Refuse("b", "group_finished")]


# Groups


def test_the_papers_example_scaled_down() -> None:
    """B' = 5 groups of N' = 5 race for B = 4 of N = 4: 25 episodes for 16, as 80 * 10 for 64 * 8 in the paper."""
    limits = LedgerSettings(0, 4, spare_groups=1, spare_members=1)
    book = play(limits, *(Join(g, f"{g}{i}", 4) for g in "abcde" for i in range(5)))
    assert book.apply(Join("f", "f0", 4)) == [Refuse("f0", "no_slot")]
    for entry, g in enumerate("abc"):
        for i in range(3):
            assert book.apply(Reward(f"{g}{i}")) == []
        surplus = [MemberDropped(f"{g}4", "surplus"), AbortEpisode(f"{g}4", "surplus")]
        assert book.apply(Reward(f"{g}3")) == [*surplus, Occupied(g, 0, entry)]
    for member in ("d0", "d1", "d2", "e0"):
        assert book.apply(Reward(member)) == []
    assert table(book) == [(0, "STUCK", 3, 2)]
    assert book.apply(Reward("d4")) == [
        MemberDropped("d3", "surplus"),
        AbortEpisode("d3", "surplus"),
        Occupied("d", 0, 3),
        BatchReady(0),
        GroupDropped("e", "no_room"),
        *(AbortEpisode(f"e{i}", "no_room") for i in range(1, 5)),
    ]
    assert book.apply(Consume(0)) == [Consumed(0, ("a", "b", "c", "d"))]


def test_a_group_in_a_complete_batch_takes_the_place_of_the_youngest_if_it_is_faster() -> None:
    # a, b hold batch 1; c, d hold 0. c completes it, and d races on for batch 1.
    book = play(LedgerSettings(1, 1, spare_groups=1), *solos("abcd"))
    assert book.apply(Reward("c")) == [Occupied("c", 0, 0), BatchReady(0)]
    assert book.apply(Reward("d")) == [
        *lost("b", "surplus"),
        Moved("d", 0, 1),
        Occupied("d", 1, 0),
        BatchReady(1),
        *lost("a", "no_room"),
    ]


# Equal rewards


def test_a_group_of_equal_rewards_is_dropped_and_frees_its_entry() -> None:
    book = play(LedgerSettings(0, 1, drop_equal=True), *(Join("g", e, 2) for e in "ab"), Reward("a", 0.5))
    assert book.apply(Reward("b", 0.5)) == [GroupDropped("g", "zero_variance")]
    assert book.apply(Join("h", "h", 1)) == [Admit("h", "h", 0, 0)]


@pytest.mark.parametrize(
    ("within", "size", "values", "dropped"),
    [
        (ROUNDING, SIZE, (0.1 + 0.2, 0.3), True),
        (ROUNDING, SIZE, (0.1 + 0.2 - 0.3, 0.0), True),
        (ROUNDING, 0.0, (0.1 + 0.2 - 0.3, 0.0), False),
        (0.0, 0.0, (0.1 + 0.2, 0.3), False),
    ],
)
def test_rewards_that_differ_by_rounding_are_equal_unless_the_ledger_began_without_it(
    within: float, size: float, values: tuple[float, float], dropped: bool
) -> None:
    limits = LedgerSettings(0, 1, drop_equal=True, equal_within=within, equal_size=size)
    book = play(limits, *(Join("g", e, 2) for e in "ab"), Reward("a", values[0]))
    assert (book.apply(Reward("b", values[1])) == [GroupDropped("g", "zero_variance")]) is dropped


@pytest.mark.parametrize(
    ("trainable", "dropped"), [((False, False), True), ((False, True), False), ((True, False), False)]
)
def test_a_group_without_a_token_to_train_is_dropped(trainable: tuple[bool, bool], dropped: bool) -> None:
    book = play(LedgerSettings(0, 1), *(Join("g", name, 2) for name in "ab"), Reward("a", 0.0, trainable[0]))
    last = Reward("b", 1.0, trainable[1])
    commands = book.apply(event_from_json(event_to_json(last)))
    assert (commands == [GroupDropped("g", "nothing_to_train")]) is dropped
    assert ("trainable" in event_to_json(last)) is not last.trainable, "older builds read the event"


def test_the_entry_of_equal_rewards_is_filled_and_surplus_members_are_dropped_first() -> None:
    limits = LedgerSettings(1, 1, spare_members=1, drop_equal=True)
    start: list[Event] = [*(Join("g", e, 2) for e in "abc"), Join("h", "h", 1), Reward("a", 1.0)]
    assert play(limits, *start).apply(Reward("c", 1.0)) == [
        MemberDropped("b", "surplus"),
        AbortEpisode("b", "surplus"),
        GroupDropped("g", "zero_variance"),
        Moved("h", 0, 1),
    ]


@pytest.mark.parametrize(
    ("drop_equal", "values"),
    [(True, (0.0, 1.0)), (True, (None, None)), (True, (0.0, None)), (False, (0.0, 0.0)), (True, (0.0,))],
)
def test_other_groups_are_trained(drop_equal: bool, values: tuple[float | None, ...]) -> None:
    limits = LedgerSettings(0, 1, 1, drop_equal=drop_equal)
    book = play(limits, *(Join("g", f"g{i}", 3) for i in range(3)))
    commands = [command for i, value in enumerate(values) for command in book.apply(Reward(f"g{i}", value))]
    commands += [command for i in range(len(values), 3) for command in book.apply(Drop(f"g{i}", "x"))]
    assert commands[-2:] == [Occupied("g", 0, 0), BatchReady(0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(value: float) -> None:
    book = play(LedgerSettings(0, 1), *solos("a"))
    with pytest.raises(ValueError, match="finite"):
        book.apply(Reward("a", value))
    assert book.apply(Reward("a", 1.0)) == [Occupied("a", 0, 0), BatchReady(0)]
