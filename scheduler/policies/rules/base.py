"""The seam between StaleFlow's ledger and its competitors: a rule decides which group may start and which batch trains it.

A rule is a state machine of `staleness_events`: `apply` depends on the state and the event alone, so that the stored events,
replayed in their order under the same settings, give the state again. Batches are numbered from 0; batch b makes version b + 1
out of version b, and is trained once, in order.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from scheduler.policies.staleness import BufferRow, GroupRow, LedgerSettings
from scheduler.policies.staleness_events import Command, Event


class StalenessRule(Protocol):
    """One way to decide. Register it in `scheduler.policies.rules`."""

    settings: LedgerSettings
    version: int
    """The newest published version."""
    consumed: int
    """The next batch to train."""

    def apply(self, event: Event) -> list[Command]:
        """Changes the state by `event`. Raises ValueError, and changes nothing, if the event is impossible.

        The answer [Refuse(...)] alone changes nothing either, and such an event need not be stored.
        """

    def entries(self, buffer: int) -> tuple[str, ...]:
        """The groups of batch `consumed` (others: as far as they are known), in order: it only grows, until it is `complete`."""

    def complete(self, buffer: int) -> bool:
        """True if the batch gets no more groups and can be trained."""

    def buffers(self) -> list[BufferRow]:
        """Every batch that is not consumed and can hold something, in order."""

    def groups(self) -> list[GroupRow]:
        """Every group that is not forgotten. To be read only."""

    def free_slots(self) -> int:
        """How many new groups could start now."""

    def to_json(self) -> dict[str, Any]:
        """The whole state and the settings."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
