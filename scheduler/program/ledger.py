"""The staleness ledger as a reactor: what may start, in which batch it is trained (`scheduler.policies.rules`).

Owns the rule's state. The gateway asks it within one step of its event loop and stores what was decided together with the event,
so the recording has the events in the order in which the store has them. An event that is impossible changes nothing, and is
answered as such.
"""

from __future__ import annotations

from typing import Any

from scheduler.policies import rules
from scheduler.policies.rules import StalenessRule
from scheduler.policies.staleness import LedgerSettings
from scheduler.policies.staleness_events import Command, Event
from scheduler.reactor import Context, Reactor


class Ledger(Reactor):
    """One trained model's."""

    def __init__(self, name: str, rule: StalenessRule) -> None:
        super().__init__(name)
        self.rule = rule
        """To be read; it changes by events alone."""
        event: Any = Event
        self.told = self.physical("told", event)
        self.decided = self.output("decided", tuple[Command, ...])
        self.impossible = self.output("impossible", str)
        self.reaction(self._on_told, on=[self.told], writes=[self.decided, self.impossible])

    def _on_told(self, now: Context) -> None:
        event: Event = now[self.told]
        try:
            commands = self.rule.apply(event)
        except ValueError as error:
            now.set(self.impossible, str(error))
        else:
            now.set(self.decided, tuple(commands), why=type(event).__name__)


def described(name: str, rule: StalenessRule) -> dict[str, Any]:
    """A rule as it is now, in the JSON form that `built` reads."""
    return {"rule": name, "state": rule.to_json()}


def built(described: dict[str, Any]) -> StalenessRule:
    """`described`: {"rule": NAME, "state": ...}, or without a state {"rule": NAME, "settings": fields of LedgerSettings}."""
    if "state" in described:
        return rules.restore(described["rule"], described["state"])
    return rules.create(described["rule"], LedgerSettings(**described["settings"]))
