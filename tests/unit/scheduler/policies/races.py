"""Groups that race for places in a batch."""

from __future__ import annotations

from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_events import AbortEpisode, Command, Event, GroupDropped, Join, Refuse
from scheduler.policies.staleness_state import LedgerSettings


def play(limits: LedgerSettings, *events: Event) -> StaleFlow:
    book = StaleFlow(limits)
    for event in events:
        assert not any(isinstance(command, Refuse) for command in book.apply(event)), event
    return book


def solos(names: str) -> list[Event]:
    """Groups of one, whose episodes have the groups' names."""
    return [Join(name, name, 1) for name in names]


def lost(names: str, reason: str) -> list[Command]:
    """The commands by which these groups of one are given up while they run."""
    return [command for x in names for command in (GroupDropped(x, reason), AbortEpisode(x, reason))]


def table(book: StaleFlow) -> list[tuple[int, str, int, int]]:
    return [(row.batch, row.state, row.occupied, row.reserved) for row in book.batches()]
