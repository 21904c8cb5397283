"""Groups for which no batch is left, batches that are stuck, and rewards that take their time: traces worked out by hand."""

from __future__ import annotations

import json
from typing import Literal

import pytest

from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import (
    AbortEpisode,
    BatchReady,
    Command,
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
    OverBound,
    Publish,
    Refuse,
    Reward,
    Skipped,
    Unstick,
    command_to_json,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LateAction, LedgerSettings
from tests.harness.states import state_of
from tests.unit.scheduler.policies.races import lost, play, solos, table


def no_room(late: LateAction) -> StaleFlow:
    """Version 1, eta 1: a, b and c of version 0 race for batch 1, their last. Batch 2 is empty."""
    limits = LedgerSettings(1, 1, spare_groups=2, late_groups=late)
    return play(limits, *solos("abcdef"), Reward("d"), Consume(0), Publish(1))


def late_groups(book: StaleFlow) -> list[str]:
    return [group.group_id for group in book.groups() if group.late]


# Groups beyond their bound


def test_late_cancel_aborts() -> None:
    book = no_room("cancel")
    assert book.apply(Reward("a")) == [Occupied("a", 1, 0), BatchReady(1), *lost("bc", "no_room")]


def test_late_drop_lets_the_episodes_run_to_their_end_in_vain() -> None:
    book = no_room("drop")
    dropped = [GroupDropped("b", "no_room"), GroupDropped("c", "no_room")]
    assert book.apply(Reward("a")) == [Occupied("a", 1, 0), BatchReady(1), *dropped]
    assert book.apply(Finish("b")) == [Refuse("b", "group_finished")]
    assert book.apply(Reward("b", 1.0)) == [Refuse("b", "group_finished")]
    assert book.apply(Drop("c", "x")) == [Refuse("c", "group_finished")]


def test_late_mask_gives_the_next_batch_beyond_the_window() -> None:
    book = no_room("mask")
    ready = [Occupied("a", 1, 0), BatchReady(1)]
    assert book.apply(Reward("a")) == [*ready, OverBound("b", 1, 2), OverBound("c", 1, 2)]
    assert late_groups(book) == ["b", "c"]
    assert table(book) == [(1, "READY_WITH_CAPACITY", 1, 0), (2, "PENDING", 0, 2)]
    # No batch after 2 is open yet, so c is late once more and has no place.
    assert book.apply(Reward("b")) == [Occupied("b", 2, 0), BatchReady(2), *lost("c", "no_room")]
    book.apply(Consume(1))
    book.apply(Publish(2))
    assert book.apply(Consume(2)) == [Consumed(2, ("b",))], "trained two versions after its own"


@pytest.mark.parametrize(("late", "abort"), [("cancel", True), ("drop", False)])
def test_skipped_groups_without_mask(late: Literal["cancel", "drop"], abort: bool) -> None:
    book = play(LedgerSettings(0, 2, late_groups=late), *solos("ab"), Reward("a"))
    aborted = [AbortEpisode("b", "stale")] if abort else []
    assert book.apply(Publish(1)) == [GroupDropped("b", "stale"), *aborted, Skipped(0, 1, ("a",))]


def test_overtake_trains_the_groups_that_finish_first() -> None:
    book = play(LedgerSettings(1, 1, late_groups="overtake"), *solos("ab"))
    assert [group.batch for group in book.groups()] == [1, 0]
    assert book.apply(Reward("a")) == [Moved("b", 0, 1), Occupied("a", 0, 0), BatchReady(0)]
    for event in (Leased(0), Publish(1), Consume(0), Join("c", "c", 1)):
        book.apply(event)
    assert book.apply(Reward("c")) == [OverBound("b", 1, 2), Occupied("c", 1, 0), BatchReady(1)]
    assert late_groups(book) == ["b"]
    for event in (Leased(1), Publish(2), Consume(1)):
        book.apply(event)
    assert book.apply(Reward("b")) == [Occupied("b", 2, 0), BatchReady(2)], "two versions after its own"


# Grading


def test_an_episode_that_is_graded_keeps_its_place() -> None:
    book = play(LedgerSettings(0, 1), *solos("a"))
    assert book.apply(Finish("a")) == [Grading("a")]
    assert book.apply(Finish("a")) == [Refuse("a", "episode_finished")]
    assert book.apply(Join("b", "b", 1)) == [Refuse("b", "no_slot")]
    assert book.apply(Reward("a", 1.0)) == [Occupied("a", 0, 0), BatchReady(0)]
    assert book.apply(Finish("a")) == [Refuse("a", "group_finished")]


def test_a_grading_that_fails_drops_the_episode() -> None:
    book = play(LedgerSettings(0, 1), *(Join("g", e, 3) for e in "abc"), Finish("a"), Reward("b"))
    assert book.apply(Finish("b")) == [Refuse("b", "episode_finished")]
    assert book.apply(Reward("c")) == [], "a is graded"
    dropped = MemberDropped("a", "grader failed")
    assert book.apply(Drop("a", "grader failed")) == [dropped, Occupied("g", 0, 0), BatchReady(0)]


def test_a_grading_for_a_dropped_group_is_aborted() -> None:
    book = play(LedgerSettings(0, 1), *solos("a"), Finish("a"))
    assert book.apply(Publish(1)) == [*lost("a", "stale"), Skipped(0, 1, ())]


# Stuck batches


def test_retry_frees_the_entries_of_a_stuck_batch() -> None:
    book = play(LedgerSettings(0, 3), *solos("abc"), Reward("a"))
    assert book.stuck() == ("b", "c")
    assert book.apply(Unstick(0, "retry")) == lost("bc", "retry")
    assert book.stuck() == ()
    assert table(book) == [(0, "PENDING", 1, 0)]
    assert book.free_slots() == 2


def test_truncate_makes_a_stuck_batch_complete() -> None:
    book = play(LedgerSettings(0, 3), *solos("abc"), Reward("a"))
    assert book.apply(Unstick(0, "truncate")) == [*lost("bc", "truncated"), BatchReady(0)]
    assert book.complete(0)
    assert book.free_slots() == 0
    assert book.apply(Join("d", "d", 1)) == [Refuse("d", "no_slot")]
    assert book.apply(Leased(0)) == []
    assert book.apply(Publish(1)) == [], "leased and complete"
    assert book.apply(Consume(0)) == [Consumed(0, ("a",))]


@pytest.mark.parametrize(
    ("limits", "events"),
    [
        (LedgerSettings(0, 2), [*solos("a"), Reward("a")]),
        (LedgerSettings(0, 1), [*solos("a"), Reward("a")]),
        (LedgerSettings(0, 3, stuck_groups=1), [*solos("abc"), Reward("a")]),
        (LedgerSettings(0, 3, spare_groups=1, stuck_groups=1), [*solos("abcd"), Reward("a")]),
    ],
    ids=["an entry is empty", "complete", "lacks too many", "lacks too many, with a spare"],
)
def test_other_batches_are_not_stuck(limits: LedgerSettings, events: list[Event]) -> None:
    book = play(limits, *events)
    before = state_of(book)
    assert book.stuck() == ()
    assert book.apply(Unstick(0, "retry")) == [Refuse("", "not_stuck")]
    assert book.apply(Unstick(0, "truncate")) == [Refuse("", "not_stuck")]
    with pytest.raises(ValueError, match="batch 1 stuck: the next to train is 0"):
        book.apply(Unstick(1, "retry"))
    assert state_of(book) == before


# JSON


def test_events_and_commands_survive_json() -> None:
    events: list[Event] = [Finish("a"), Reward("a"), Reward("a", 0.25), Unstick(3, "truncate")]
    text = json.dumps([event_to_json(event) for event in events])
    assert [event_from_json(value) for value in json.loads(text)] == events
    commands: list[Command] = [
        OverBound("g", 1, 2),
        Grading("a"),
        Skipped(0, 2, ("g", "h")),
        Skipped(0, 1, ()),
    ]
    assert json.loads(json.dumps([command_to_json(command) for command in commands])) == [
        {"type": "OverBound", "group_id": "g", "from_batch": 1, "to_batch": 2},
        {"type": "Grading", "episode_id": "a"},
        {"type": "Skipped", "first": 0, "until": 2, "group_ids": ["g", "h"]},
        {"type": "Skipped", "first": 0, "until": 1, "group_ids": []},
    ]
    with pytest.raises(ValueError, match="no event of the ledger"):
        event_from_json({"type": "Late", "group_id": "g"})


def test_a_reward_that_an_older_build_stored_is_understood() -> None:
    assert event_from_json({"type": "Reward", "episode_id": "a"}) == Reward("a", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"spare_groups": -1},
        {"spare_members": -1},
        {"stuck_groups": 0},
        {"late_groups": "never"},
        {"late_groups": "overtake", "spare_groups": 1},
    ],
)
def test_impossible_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LedgerSettings(0, 1, **wrong)  # type: ignore[arg-type]
