"""The staleness ledger, made durable: every event that changes it is stored, and a restart replays them.

The pure ledger decides (scheduler/policies/staleness.py). An event is applied and submitted to the store in one step without an
await between, so the stored order is the applied order; `apply` returns once the event is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from gateway.errors import Conflict, Unavailable
from gateway.settings import StalenessSettings
from gateway.store import ledger as statements
from gateway.store.database import Database
from scheduler.policies.staleness import (
    Ledger,
    LedgerSettings,
    command_to_json,
    event_from_json,
    event_to_json,
)
from scheduler.policies.staleness_events import AbortEpisode, Command, Event, Refuse

_SETTINGS = "Settings"


class StoredLedger:
    """The ledger of one trained model."""

    def __init__(self, database: Database, ledger: Ledger, model: str) -> None:
        self.ledger = ledger
        self.model = model
        self.on_abort: Callable[[str, str], None] = lambda _episode_id, _reason: None
        """Called with (episode_id, reason) for an episode that runs in vain."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after every committed event: slots may be free."""
        self.broken: str | None = None
        """Why nothing can be applied any more: an event was not committed, so memory says more than the store."""
        self._database = database
        self._changed = asyncio.Event()

    @classmethod
    async def load(cls, database: Database, settings: StalenessSettings, model: str) -> StoredLedger:
        """Replays the stored events. Raises Conflict if they were made under other settings."""
        wanted = LedgerSettings(settings.eta, settings.batch, settings.min_members)
        stored = await database.read(lambda c: statements.events(c, model))
        if not stored:
            row = {"type": _SETTINGS, **asdict(wanted)}
            await database.submit(lambda c: statements.insert_event(c, model, row, []))
        elif stored[0] != {"type": _SETTINGS, **asdict(wanted)}:
            raise Conflict(
                f"the store's ledger of {model!r} was begun with other [staleness] settings ({stored[0]}); set them back, or name"
                " another database in [store] url"
            )
        ledger = Ledger(wanted)
        for event in stored[1:]:
            ledger.apply(event_from_json(event))
        return cls(database, ledger, model)

    async def apply(self, event: Event, also: Callable[[Connection], Any] | None = None) -> list[Command]:
        """Applies an event and commits it, together with `also`, in one transaction.

        An event that is refused changes nothing, stores nothing and leaves `also` undone. Raises ValueError on an impossible one.
        """
        if self.broken is not None:
            raise Unavailable(self.broken, retry_after=30.0, code="ledger_broken")
        commands = self.ledger.apply(event)
        if any(isinstance(command, Refuse) for command in commands):
            return commands
        stored = event_to_json(event), [command_to_json(command) for command in commands]

        def write(connection: Connection) -> None:
            if also is not None:
                also(connection)
            statements.insert_event(connection, self.model, *stored)

        committed = self._database.submit(write)
        for command in commands:
            if isinstance(command, AbortEpisode):
                self.on_abort(command.episode_id, command.reason)
        try:
            await committed
        except Exception as error:
            self.broken = f"the ledger is ahead of the store; restart the gateway ({error})"
            raise
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()
        return commands

    async def changed(self, timeout_s: float) -> None:
        """Waits for the next event, or until the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
