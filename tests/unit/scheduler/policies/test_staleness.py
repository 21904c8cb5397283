"""The ledger by traces that were worked out by hand."""

from __future__ import annotations

import pytest

from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_base import DROPPED_KEPT
from scheduler.policies.staleness_events import (
    Admit,
    BatchReady,
    CloseGroup,
    Command,
    Consume,
    Consumed,
    Drop,
    Event,
    GroupDropped,
    Join,
    Leased,
    MemberDropped,
    Moved,
    Occupied,
    Publish,
    Refuse,
    Returned,
    Reward,
    Skipped,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LedgerSettings
from tests.harness.states import state_of


def ledger(eta: int, batch: int, *events: Event, min_members: int = 2) -> StaleFlow:
    new = StaleFlow(LedgerSettings(eta, batch, min_members))
    for event in events:
        new.apply(event)
    return new


def solo(name: str) -> Join:
    """A group of one, whose episode has the group's name."""
    return Join(name, name, 1)


def solos(names: str) -> list[Event]:
    return [solo(name) for name in names]


def test_without_staleness_a_round_is_generate_train_publish() -> None:
    book = ledger(0, 2, *solos("ab"))
    assert book.apply(Reward("b")) == [Occupied("b", 0, 0)]
    assert book.apply(solo("c")) == [Refuse("c", "no_slot")]
    assert book.apply(Reward("a")) == [Occupied("a", 0, 1), BatchReady(0)]
    assert book.apply(Consume(0)) == [Consumed(0, ("b", "a"))]
    assert book.apply(solo("c")) == [Refuse("c", "no_slot")], "version 1 is not there yet"
    assert book.apply(Publish(1)) == []
    assert book.apply(solo("c")) == [Admit("c", "c", 1, 1)]


def test_the_first_to_finish_changes_places_with_one_that_may_wait() -> None:
    # a: batch 1, b: batch 0. a finishes first, and b's window [0, 1] reaches batch 1.
    book = ledger(1, 1, *solos("ab"))
    assert book.apply(Reward("a")) == [Moved("b", 0, 1), Occupied("a", 0, 0), BatchReady(0)]
    assert book.apply(Reward("b")) == [Occupied("b", 1, 0), BatchReady(1)]


def test_a_group_does_not_move_out_of_its_window() -> None:
    # At version 1, b (V = 0, batch 1) cannot go to batch 2, so c (V = 1) stays there and batch 1 waits for b.
    book = ledger(1, 1, *solos("ab"), Reward("a"), Consume(0), Publish(1), solo("c"))
    assert [(g.group_id, g.batch) for g in book.groups()] == [("b", 1), ("c", 2)]
    assert book.apply(Reward("c")) == [Occupied("c", 2, 0), BatchReady(2)]
    assert [(r.batch, r.state) for r in book.batches()] == [(1, "STUCK"), (2, "READY")]
    with pytest.raises(ValueError, match="batch 1 trained: it is not complete"):
        book.apply(Consume(1))
    assert book.apply(Reward("b")) == [Occupied("b", 1, 0), BatchReady(1)]


def test_a_freed_entry_travels_in_steps_if_windows_are_short() -> None:
    # Version 1: w, v hold 3 and x holds 2. Version 2: z, u hold 4 and y holds 2.
    book = ledger(2, 2, Publish(1), *solos("wvx"), Publish(2), *solos("zuy"))
    dropped = [MemberDropped("w", "d"), GroupDropped("w", "too_few_rewards")]
    assert book.apply(Drop("w", "d")) == [*dropped, Moved("y", 2, 3)], "the youngest"
    # x's window ends at 3, so y goes on to 4 and x follows it to 3.
    dropped = [MemberDropped("z", "d"), GroupDropped("z", "too_few_rewards")]
    assert book.apply(Drop("z", "d")) == [*dropped, Moved("y", 3, 4), Moved("x", 2, 3)]


def test_closing_a_group_counts_missing_members_as_dropped() -> None:
    book = ledger(0, 2, Join("g", "a", 3), Join("g", "b", 3), Reward("a"))
    assert book.apply(CloseGroup("g", "driver died")) == [], "b still runs"
    assert book.apply(Join("g", "c", 3)) == [Refuse("c", "group_closed")]
    assert book.apply(Reward("b")) == [Occupied("g", 0, 0)]
    assert book.apply(CloseGroup("g", "again")) == []
    lone = ledger(0, 2, Join("h", "a", 3), Reward("a"))
    assert lone.apply(CloseGroup("h", "x")) == [GroupDropped("h", "too_few_rewards")]


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        (Join("full", "x", 2), Refuse("x", "group_full")),
        (Join("open", "x", 3), Refuse("x", "size_differs")),
        (Join("done", "x", 1), Refuse("x", "group_finished")),
        (Join("gone", "x", 1), Refuse("x", "group_finished")),
        (Join("new", "x", 1), Refuse("x", "no_slot")),
        (Reward("done"), Refuse("done", "group_finished")),
        (Drop("gone", "x"), Refuse("gone", "group_finished")),
        (Reward("f1"), Refuse("f1", "episode_finished")),
    ],
)
def test_refusals_change_nothing(event: Event, refusal: Command) -> None:
    start = [solo("done"), Reward("done"), solo("gone"), Drop("gone", "x")]
    full = [Join("full", "f1", 2), Join("full", "f2", 2), Reward("f1")]
    book = ledger(0, 3, *start, *full, Join("open", "o1", 2))
    before = state_of(book)
    assert book.apply(event) == [refusal]
    assert state_of(book) == before


@pytest.mark.parametrize(
    "event",
    [
        Join("g", "a", 2),
        Join("h", "b", 0),
        Reward("unknown"),
        Drop("unknown", "x"),
        CloseGroup("nothing", "x"),
        Leased(1),
        Returned(1),
        Consume(0),
        Consume(1),
        Publish(0),
    ],
)
def test_impossible_events_raise_and_change_nothing(event: Event) -> None:
    book = ledger(1, 2, Join("g", "a", 2))
    before = state_of(book)
    with pytest.raises(ValueError, match=r"\w"):
        book.apply(event)
    assert state_of(book) == before


@pytest.mark.parametrize(("version", "commands"), [(0, []), (2, [Skipped(0, 2, ("a",))])])
def test_a_batch_that_is_given_back_is_skipped_once_a_later_version_is_published(
    version: int, commands: list[Command]
) -> None:
    newer = [Publish(version)] if version else []
    book = ledger(1, 1, solo("a"), Reward("a"), Leased(0), *newer)
    assert book.next_batch == 0
    assert book.apply(Returned(0)) == commands
    assert (book.next_batch, book.leased) == (version, False)


def test_consumed_groups_are_forgotten_and_their_names_are_free() -> None:
    book = ledger(0, 1, solo("a"), Reward("a"), Consume(0), Publish(1))
    assert book.groups() == []
    with pytest.raises(ValueError, match="no episode a"):
        book.apply(Reward("a"))
    assert book.apply(solo("a")) == [Admit("a", "a", 1, 1)]


def test_dropped_groups_are_remembered_up_to_a_number() -> None:
    book = ledger(0, 1)
    for i in range(DROPPED_KEPT + 10):
        book.apply(solo(f"g{i}"))
        book.apply(Drop(f"g{i}", "x"))
    assert len(book.groups()) == DROPPED_KEPT
    assert book.apply(solo("g9"))[0] == Admit("g9", "g9", 0, 0)
    assert book.apply(Join("g10", "x", 1)) == [Refuse("x", "group_finished")]


@pytest.mark.parametrize(
    "value", [{}, {"type": "Nap"}, {"type": "Publish"}, {"type": "Publish", "version": 1, "extra": 2}]
)
def test_json_that_is_no_event_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"event|fields"):
        event_from_json(value)


@pytest.mark.parametrize(("eta", "batch", "members"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_settings(eta: int, batch: int, members: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        LedgerSettings(eta, batch, members)


def admitted(book: StaleFlow, name: str, engine: int | None, group: str = "") -> tuple[int, int]:
    """The V and the batch of a group whose first episode an engine of this version would sample."""
    join = Join(group or name, name, 2 if group else 1, engine)
    expected = book.version_of(join)
    (admit,) = book.apply(join)
    assert isinstance(admit, Admit)
    assert group or expected == admit.version
    return admit.version, admit.batch


def test_a_later_member_is_no_older_than_its_group() -> None:
    book = ledger(3, 2, Publish(4))
    admitted(book, "g-1", 3, group="g")
    for engine, version in ((2, 3), (4, 4), (None, 4)):
        assert book.version_of(Join("g", "g-2", 2, engine)) == version
    assert admitted(book, "g-2", 2, group="g") == (3, 6)


def test_a_join_without_an_engine_is_stored_as_it_always_was() -> None:
    assert event_to_json(Join("g", "e", 2)) == {"type": "Join", "group_id": "g", "episode_id": "e", "size": 2}
    assert event_from_json(event_to_json(Join("g", "e", 2, 3))) == Join("g", "e", 2, 3)


def test_an_episode_of_a_dropped_group_joins_another_once() -> None:
    book = ledger(1, 1, solo("a"), Drop("a", "idle_deadline"))
    late = Join("late-a", "a", 1, 0)
    assert book.apply(late) == [Admit("a", "late-a", 1, 0)]
    with pytest.raises(ValueError, match="has joined before"):
        book.apply(Join("later-a", "a", 1, 0))
    assert book.apply(Reward("a")) == [Occupied("late-a", 0, 0), BatchReady(0)]
    for i in range(DROPPED_KEPT + 1):  # the first group is forgotten, and not what the episode belongs to
        book.apply(solo(f"x{i}"))
        book.apply(Drop(f"x{i}", "left"))
    assert book.apply(Consume(0)) == [Consumed(0, ("late-a",))]
    assert book.apply(solo("a")) == [Admit("a", "a", 1, 0)], "nothing of it is left"
