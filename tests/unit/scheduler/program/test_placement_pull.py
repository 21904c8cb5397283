"""Orders to pull: none for engines that are under way, that came back unchanged, or that are unavailable."""

from __future__ import annotations

from scheduler.program.calls import EngineLoad
from scheduler.program.events import Added, Started
from tests.unit.scheduler.program.field import MODEL, Field, calls


def test_while_one_is_away_to_pull_no_other_leaves_however_long_it_takes() -> None:
    field = Field(order="pull").opens(one=0, two=0).publish(1)
    (first,) = field.pulled
    field.closes(first)
    for _ in range(12):
        field.second()
    assert field.pulled == [first]
    other = "two" if first == "one" else "one"
    field.opens(**{first: 1}).second()
    assert field.pulled == [first, other]


def test_an_order_is_repeated_after_a_while_for_one_that_comes_back_as_it_was() -> None:
    field = Field(order="pull").opens(one=0).publish(1).closes("one").opens(one=0)
    for _ in range(4):
        field.second()
    assert field.pulled == ["one"]
    field.second().second()
    assert field.pulled == ["one", "one"]


def test_one_that_is_unavailable_keeps_no_other_from_pulling() -> None:
    field = Field(order="pull").opens(one=0, two=0).publish(1)
    (first,) = field.pulled
    field.inject(
        field.program.fleets[MODEL].added, Added(first)
    )  # the fleet reports that it is unavailable for now
    field.closes(first).second()
    assert sorted(field.pulled) == ["one", "two"]


def test_a_newer_version_repeats_the_order() -> None:
    field = Field(order="pull").opens(one=0).publish(1).publish(2)
    assert field.pulled == ["one", "one"]


def test_the_version_of_the_beginning_is_never_newer_than_one_that_was_published() -> None:
    field = Field(order="pull").publish(1)
    field.inject(field.reactor.started, Started(0))
    field.opens(one=0).second()
    assert field.pulled == ["one"]


def test_engines_that_are_on_their_way_lose_no_calls_by_moving() -> None:
    """One was ordered to pull and is still open: what waits in it moves once it is closed, and nothing moves into it."""
    field = Field(order="pull", migration={"waiting_above": 0}).opens(one=0).arrive(*calls(*"abc"))
    field.publish(1).opens(two=0)
    assert field.pulled == ["one"]
    field.second(EngineLoad("one", 1, 2, 30, 1.0))
    assert field.moves == []


def test_what_an_engine_reports_counts_for_the_next_call() -> None:
    field = Field().opens(one=0, two=0)
    field.second(EngineLoad("one", 2, 0, 60, 1.0), EngineLoad("two", 0, 0, 0, 1.0)).arrive(*calls("a"))
    assert field.placed == {"a": "two"}
