"""The stored staleness ledger: every event that changes it is stored, and a restart replays them.

The pure rule decides (scheduler/policies/staleflow.py). An event is applied and submitted to the store without an await in
between, so the stored order is the applied order. After the commit `apply` returns and its listeners are informed. The same
transaction stores the decisions (`decision_log`) and ends the leases of batches that are passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from sqlalchemy import Connection

from gateway.config import StalenessSettings
from gateway.config.settings import ConfigError
from gateway.store import decisions
from gateway.store import ledger as statements
from gateway.store.database import Database
from gateway.training_feed.decision_log import DecisionLog
from headgate.errors import Unavailable
from headgate.rewards import ROUNDING, SIZE
from scheduler.policies.staleflow import StaleFlow
from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_events import (
    AbortEpisode,
    BatchReady,
    Command,
    Consume,
    Consumed,
    Event,
    Leased,
    Refuse,
    Returned,
    Skipped,
    command_to_json,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_state import LedgerSettings

_SETTINGS = "Settings"
EQUALITY: Mapping[str, Any] = {"equal_within": ROUNDING, "equal_size": SIZE}
"""What equal rewards are for a new ledger. An old one, of a build that did not store a key, was begun with 0."""
_BOUND = {field.name for field in fields(LedgerSettings)} - {*EQUALITY}
"""The keys of [staleness] on which the meaning of the stored events depends."""


class LedgerListener:
    """A listener to a ledger's events, which overrides what it needs."""

    def episode_aborted(self, episode_id: str, reason: str) -> None:
        """Stop an episode whose run is not needed any more. Called before the event is committed."""

    def ledger_changed(self, model: str) -> None:
        """Handle a committed event: slots may be free."""

    def batch_changed(self, model: str) -> None:
        """Handle a batch that was leased, given back, completed, trained or passed over, once that is committed."""


class StoredLedger:
    """The ledger of one trained model."""

    def __init__(self, database: Database, rule: StalenessRule, model: str) -> None:
        self.rule = rule
        self.model = model
        self.decision_log = DecisionLog()
        self.leased = self.trained = -1
        """The newest batch that was leased, and the newest that was trained; -1: none."""
        self.broken: str | None = None
        """The reason why no event can be applied any more: a commit failed, so memory is ahead of the store."""
        self._listeners: list[LedgerListener] = []
        self._database = database
        self._changed = asyncio.Event()

    @classmethod
    async def load(cls, database: Database, settings: StalenessSettings, model: str) -> StoredLedger:
        """Replay the stored events. Raise ConfigError if they were made under other settings."""
        stored = await database.read(lambda c: statements.events(c, model))
        equality = {key: stored[0].get(key, 0.0) for key in EQUALITY} if stored else EQUALITY
        loaded = cls(database, _rule(settings, model, equality), model)
        if not stored:
            row = {"type": _SETTINGS, **settings.model_dump(include=_BOUND), **equality}
            await database.submit(lambda c: statements.insert_event(c, model, row, []))
        elif differing := different(stored[0], settings):
            raise ConfigError(_refusal(model, differing))
        for value in stored[1:]:
            event = event_from_json(value)
            loaded.decision_log.record(event, loaded._decide(event))
        return loaded

    async def apply(
        self,
        event: Event,
        also: Callable[[Connection], Any] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> list[Command]:
        """Apply an event and commit it, together with `also`, in one transaction.

        `details` are stored with the decisions about episodes. A refused event changes nothing, stores
        nothing and does not run `also`. Raise ValueError on an impossible event.
        """
        if self.broken is not None:
            raise Unavailable(self.broken, retry_after=30.0, code="ledger_broken")
        self._database.check_write()  # check before the event changes the state in memory
        commands = self._decide(event)
        if any(isinstance(command, Refuse) for command in commands):
            return commands
        decided = self.decision_log.record(event, commands)
        if details:
            decided = [replace(d, details=d.details | {**details}) if d.episode_id else d for d in decided]
        stored = event_to_json(event), [command_to_json(command) for command in commands]

        def write(connection: Connection) -> None:
            if also is not None:
                also(connection)
            statements.insert_event(connection, self.model, *stored)
            decisions.insert_decisions(connection, self.model, decided)
            for command in commands:
                if isinstance(command, Skipped):
                    statements.skip_leases(connection, self.model, command.until)

        committed = self._database.put(write)
        committed.add_done_callback(partial(self._on_commit, _is_of_batch(event, commands)))
        for command in commands:
            if isinstance(command, AbortEpisode):
                for listener in self._listeners:
                    listener.episode_aborted(command.episode_id, command.reason)
        await asyncio.shield(committed)  # a caller that stops waiting does not stop the commit
        return commands

    def _decide(self, event: Event) -> list[Command]:
        commands = self.rule.apply(event)
        if isinstance(event, Leased):
            self.leased = event.batch
        elif isinstance(event, Consume):
            self.trained = event.batch
        return commands

    def _on_commit(self, of_batch: bool, committed: asyncio.Future[None]) -> None:
        if error := committed.exception():
            self.broken = f"the ledger is ahead of the store; restart the gateway ({error})"
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener.ledger_changed(self.model)
        if of_batch and self.broken is None:
            for listener in self._listeners:
                listener.batch_changed(self.model)

    def subscribe(self, listener: LedgerListener) -> None:
        """Inform a listener of every event from now on."""
        self._listeners.append(listener)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next event, or until the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


def _is_of_batch(event: Event, commands: list[Command]) -> bool:
    """Return whether a batch was leased, given back, became whole, was trained or was passed over."""
    of_batch = any(isinstance(command, BatchReady | Consumed | Skipped) for command in commands)
    return of_batch or isinstance(event, Leased | Returned)


def different(stored: dict[str, Any], settings: StalenessSettings) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which the settings that a ledger was begun with differ from `settings`: (stored, wanted).

    A missing key did not exist when the ledger was begun, and had the effect of its default.
    """
    defaults = StalenessSettings().model_dump(include=_BOUND)
    wanted = settings.model_dump(include=_BOUND)
    begun = defaults | _renamed(stored)
    return {key: (begun[key], wanted.get(key)) for key in sorted(begun) if begun[key] != wanted.get(key)}


def _renamed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a ledger was begun with under their present names.

    Builds before 0.2 had a choice of rules. What is left of it is `late_groups = "overtake"`; any other rule stays a difference.
    """
    begun = {key: value for key, value in stored.items() if key not in ("type", *EQUALITY)}
    if "late" in begun:
        begun["late_groups"] = begun.pop("late")
    if begun.get("rule") in ("verl", "areal") and begun.get("late_groups") == "mask":
        begun["late_groups"], begun["rule"] = "overtake", "staleflow"
    if begun.get("rule") == "staleflow":
        del begun["rule"]
    return begun


async def check_settings(database: Database, settings: StalenessSettings, model: str) -> None:
    """Raise ConfigError if the ledger of a model cannot continue under these settings."""
    _rule(settings, model)
    stored = await database.read(lambda c: statements.events(c, model, limit=1))
    if stored and (differing := different(stored[0], settings)):
        raise ConfigError(_refusal(model, differing))


def _rule(settings: StalenessSettings, model: str, equality: Mapping[str, Any] = EQUALITY) -> StalenessRule:
    try:
        limits = LedgerSettings(**settings.model_dump(include=_BOUND), **equality)
        return StaleFlow(limits)
    except ValueError as error:
        raise ConfigError(f"[staleness] of {model!r}: {error}") from error


def _refusal(model: str, differing: dict[str, tuple[Any, Any]]) -> str:
    named = ", ".join(f"{key} = {begun!r} (now {wanted!r})" for key, (begun, wanted) in differing.items())
    return (
        f"[staleness] of {model!r} differs from the settings that its ledger in the store began with: {named};"
        " restore these values, or name another database in [store] url"
    )
