"""Tells those who watch what the engines do: a duty of the coordinator, which knows the states of all of them.

States that last less than the duty's interval may go untold: `version.live` has the steps of an update with their seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.rollout.slot import Slot
from gateway.store.database import Database
from gateway.store.events import Event, insert_events

_Engines = dict[tuple[str, str], dict[str, Any]]
"""What is told of each engine, by model and name."""


class EngineEvents:
    """Turns changes of the engines' states into events; keeps the states that were stored last."""

    def __init__(self, database: Database, engines: Mapping[str, Mapping[str, Slot]]) -> None:
        """`engines`: by model and name; looked at again each time."""
        self._database = database
        self._engines = engines
        self._told: _Engines = {}

    async def tend(self) -> None:
        """Stores an event of each change since the last time; a change that could not be stored is stored the next time."""
        now: _Engines = {
            (model, slot.name): _described(slot)
            for model, slots in self._engines.items()
            for slot in slots.values()
        }
        if changed := list(_changes(self._told, now)):
            await self._database.submit(lambda c: insert_events(c, changed))
        self._told = now


def _described(slot: Slot) -> dict[str, Any]:
    node = {"node": slot.node} if slot.node else {}
    return {"engine": slot.name, "state": slot.state, "version": slot.version, "reason": slot.reason, **node}


def _changes(before: _Engines, now: _Engines) -> Iterable[Event]:
    for key, described in now.items():
        if before.get(key) != described:
            yield Event(f"engine.{described['state']}", key[0], data=described)
    for model, name in before.keys() - now.keys():
        yield Event("engine.removed", model, data={"engine": name})
