"""Publishes what engines and nodes do as events. Runs in the coordinator, which knows all their states.

States that last less than the duty's interval may go untold: `version.live` has the steps of an update with their seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NotRequired, TypedDict

from gateway.control.nodes import ManagedNode
from gateway.generation.slot import Slot
from gateway.store.database import Database
from gateway.store.events import Event, insert_events


class EngineState(TypedDict):
    """An engine's state, as its events store it."""

    engine: str
    state: str
    version: int
    reason: str
    node: NotRequired[str]


_Engines = dict[tuple[str, str], EngineState]
"""The last event of each engine, by model and name."""


class EngineEvents:
    """Turns changes of the engines' states into events; keeps the states that were stored last."""

    def __init__(
        self, database: Database, engines: Mapping[str, Mapping[str, Slot]], nodes: Mapping[str, ManagedNode]
    ) -> None:
        """`engines`: by model and name; `nodes`: by name; both are read each time."""
        self._nodes = nodes
        self._roles: dict[str, tuple[str, str]] = {}
        self._database = database
        self._engines = engines
        self._stored: _Engines = {}

    async def tend(self) -> None:
        """Store an event of each change since the last time; a change that could not be stored is stored the next time."""
        now: _Engines = {
            (model, slot.name): _described(slot)
            for model, slots in self._engines.items()
            for slot in slots.values()
        }
        roles = {name: (str(node.role), node.reason) for name, node in self._nodes.items()}
        if changed := [*_changes(self._stored, now), *_moves(self._roles, roles)]:
            await self._database.submit(lambda c: insert_events(c, changed))
        self._stored, self._roles = now, roles


def _described(slot: Slot) -> EngineState:
    state: EngineState = {
        "engine": slot.name,
        "state": slot.state,
        "version": slot.version,
        "reason": slot.reason,
    }
    return {**state, "node": slot.node} if slot.node else state


def _moves(before: Mapping[str, tuple[str, str]], now: Mapping[str, tuple[str, str]]) -> Iterable[Event]:
    """Change of nodes' roles. They belong to no model, so projects do not see them."""
    for name, (role, reason) in now.items():
        if before.get(name) != (role, reason):
            yield Event(f"node.{role}", "", data={"node": name, "role": role, "reason": reason})
    for name in before.keys() - now.keys():
        yield Event("node.removed", "", data={"node": name})


def _changes(before: _Engines, now: _Engines) -> Iterable[Event]:
    for key, described in now.items():
        if before.get(key) != described:
            yield Event(f"engine.{described['state']}", key[0], data=dict(described))
    for model, name in before.keys() - now.keys():
        yield Event("engine.removed", model, data={"engine": name})
