"""Redundant groups and members, by traces that were worked out by hand: who is trained, who is surplus, who has no room."""

from __future__ import annotations

import pytest

from headgate.rewards import ROUNDING, SIZE
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    AbortEpisode,
    Admit,
    BufferReady,
    CloseGroup,
    Consume,
    Consumed,
    Drop,
    Event,
    Finish,
    Grading,
    GroupDropped,
    Join,
    Leased,
    MemberDropped,
    Moved,
    Occupied,
    Publish,
    Refuse,
    Reward,
    Skipped,
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
        BufferReady(0),
    ]
    assert book.apply(Reward("b")) == [Refuse("b", "group_finished")]


def test_a_spare_member_replaces_one_that_was_dropped() -> None:
    book = play(LedgerSettings(0, 1, spare_members=1), *(Join("g", e, 2) for e in "ab"), Reward("a"))
    assert book.apply(Drop("b", "crash")) == [MemberDropped("b", "crash")]
    assert book.apply(Join("g", "c", 2)) == [Admit("c", "g", 0, 0)]
    assert book.apply(Reward("c")) == [Occupied("g", 0, 0), BufferReady(0)]


def test_a_group_whose_spare_members_never_come_ends_when_it_is_closed() -> None:
    start: list[Event] = [*(Join("g", e, 3) for e in "abc"), Drop("c", "crash"), Reward("a"), Reward("b")]
    book = play(LedgerSettings(0, 1, spare_members=2), *start)
    assert book.apply(CloseGroup("g", "no more")) == [Occupied("g", 0, 0), BufferReady(0)]


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
        BufferReady(0),
        GroupDropped("e", "no_room"),
        *(AbortEpisode(f"e{i}", "no_room") for i in range(1, 5)),
    ]
    assert book.apply(Consume(0)) == [Consumed(0, ("a", "b", "c", "d"))]


def test_the_states_of_a_buffer() -> None:
    book = play(LedgerSettings(1, 1, spare_groups=1), *solos("abc"))
    assert table(book) == [(0, "PENDING", 0, 1), (1, "STUCK", 0, 2)]
    book.apply(Join("d", "d", 1))
    book.apply(Reward("c"))
    assert table(book) == [(0, "READY", 1, 1), (1, "STUCK", 0, 2)]
    assert book.complete(0)
    assert not book.complete(1)
    book.apply(Drop("d", "crash"))
    assert table(book) == [(0, "READY_WITH_CAPACITY", 1, 0), (1, "STUCK", 0, 2)]
    assert book.apply(Join("e", "e", 1)) == [Refuse("e", "no_slot")], "a complete buffer gets nobody"
    assert book.free_slots() == 0


def test_a_group_in_a_complete_buffer_takes_the_place_of_the_youngest_if_it_is_faster() -> None:
    # a, b hold buffer 1; c, d hold 0. c completes it, and d races on for buffer 1.
    book = play(LedgerSettings(1, 1, spare_groups=1), *solos("abcd"))
    assert book.apply(Reward("c")) == [Occupied("c", 0, 0), BufferReady(0)]
    assert book.apply(Reward("d")) == [
        *lost("b", "surplus"),
        Moved("d", 0, 1),
        Occupied("d", 1, 0),
        BufferReady(1),
        *lost("a", "no_room"),
    ]


def test_a_group_in_a_complete_buffer_gets_the_next_empty_entry() -> None:
    # a, b hold 2; c, d hold 1; e, f hold 0, which e completes. a's entry goes to c, and c's to f.
    book = play(LedgerSettings(2, 1, spare_groups=1), *solos("abcdef"), Reward("e"))
    dropped = [MemberDropped("a", "x"), GroupDropped("a", "too_few_rewards")]
    assert book.apply(Drop("a", "x")) == [*dropped, Moved("c", 1, 2), Moved("f", 0, 1)]


def test_a_group_in_a_complete_buffer_is_surplus_when_that_is_consumed() -> None:
    book = play(LedgerSettings(1, 1, spare_groups=1), *solos("abcd"), Reward("c"))
    assert book.apply(Consume(0)) == [Consumed(0, ("c",)), *lost("d", "surplus")]


def two_versions(spare_groups: int, *more: Event) -> StaleFlow:
    """eta 1, one group a buffer, at version 1: buffer 1 is full of version 0 (from a on), buffer 2 of version 1 (from u on)."""
    width = spare_groups + 1
    old, raced, new = "abcdefg"[:width], "hijklmn"[:width], "uvwxyz"[:width]
    first = [*solos(old + raced), Reward(raced[0]), Consume(0), Publish(1)]
    return play(LedgerSettings(1, 1, spare_groups=spare_groups), *first, *solos(new), *more)


def test_a_group_in_a_complete_buffer_takes_an_earlier_one() -> None:
    # u completes buffer 2, because a and b cannot leave buffer 1. v takes the empty entry there; b has then no room.
    book = two_versions(1)
    assert book.apply(Reward("u")) == [Occupied("u", 2, 0), BufferReady(2)]
    book.apply(Drop("a", "x"))
    assert book.apply(Reward("v")) == [Occupied("v", 1, 0), BufferReady(1), *lost("b", "no_room")]


def test_a_group_in_a_complete_buffer_gives_up_another_in_an_earlier_one() -> None:
    book = two_versions(1, Reward("u"))
    ready = [Occupied("v", 1, 0), BufferReady(1)]
    assert book.apply(Reward("v")) == [*lost("b", "surplus"), *ready, *lost("a", "no_room")]


def test_nobody_moves_into_a_complete_buffer() -> None:
    # n starts in a's place in buffer 1. Its window reaches buffer 2, but that is complete, so it does not make way for v there.
    book = two_versions(1, Reward("u"), Drop("a", "x"), Join("n", "n", 1))
    ready = [Occupied("v", 1, 0), BufferReady(1)]
    assert book.apply(Reward("v")) == [*lost("n", "surplus"), *ready, *lost("b", "no_room")]


def test_a_group_whose_last_open_buffer_is_skipped_has_no_room() -> None:
    # v is in buffer 2, which is complete, and could only get into buffer 1.
    book = two_versions(1, Reward("u"))
    assert book.apply(Publish(2)) == [*lost("ab", "stale"), Skipped(1, 2, ()), *lost("v", "no_room")]


def test_a_buffer_before_its_version_is_no_room_for_a_group() -> None:
    # Buffer 0 waits for its Consume. Buffer 1 will be skipped, and v's window is buffer 2 alone.
    start = [*solos("ab"), Reward("a"), Leased(0), Publish(2), *solos("uv")]
    book = play(LedgerSettings(0, 1, spare_groups=1), *start)
    assert book.apply(Reward("u")) == [Occupied("u", 2, 0), BufferReady(2), *lost("v", "no_room")]


def test_a_version_without_room_is_aborted_and_others_go_on() -> None:
    book = two_versions(2)
    assert book.apply(Reward("a")) == [Occupied("a", 1, 0), BufferReady(1), *lost("bc", "no_room")]
    assert table(book) == [(1, "READY_WITH_CAPACITY", 1, 0), (2, "STUCK", 0, 3)]


def test_versions_without_room_are_aborted_in_ascending_order() -> None:
    # u completed buffer 2, but v and w could still get into buffer 1, until that is complete too.
    book = two_versions(2, Reward("u"))
    assert book.apply(Reward("a")) == [Occupied("a", 1, 0), BufferReady(1), *lost("bcvw", "no_room")]


def test_later_members_may_still_join_a_racing_group() -> None:
    start = [*solos("abc"), Join("g", "g1", 2), Reward("c")]
    book = play(LedgerSettings(1, 1, spare_groups=1), *start)
    assert book.apply(Join("g", "g2", 2)) == [Admit("g2", "g", 0, 0)]


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


def test_the_entry_of_equal_rewards_is_filled_and_surplus_members_are_told_first() -> None:
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
    told = [command for i, value in enumerate(values) for command in book.apply(Reward(f"g{i}", value))]
    told += [command for i in range(len(values), 3) for command in book.apply(Drop(f"g{i}", "x"))]
    assert told[-2:] == [Occupied("g", 0, 0), BufferReady(0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(value: float) -> None:
    book = play(LedgerSettings(0, 1), *solos("a"))
    with pytest.raises(ValueError, match="finite"):
        book.apply(Reward("a", value))
    assert book.apply(Reward("a", 1.0)) == [Occupied("a", 0, 0), BufferReady(0)]
