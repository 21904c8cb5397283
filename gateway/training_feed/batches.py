"""Batches that trainers acknowledged, read again for replay after a crash and for people."""

from __future__ import annotations

from typing import Any

from gateway.store import decisions
from gateway.store.database import Database
from gateway.training_feed.groups import GroupReader, as_of
from headgate.errors import NotFound
from headgate.types import Group


class Batches:
    """The trained batches of one model."""

    def __init__(self, database: Database, reader: GroupReader) -> None:
        self._database = database
        self.reader = reader

    async def list(self) -> list[dict[str, Any]]:
        """Every batch that was trained, in order: batch, groups, trained_at (seconds since the epoch)."""
        return await self._database.read(lambda c: decisions.batches(c, self.reader.model))

    async def groups(self, batch: int) -> tuple[Group, ...]:
        """Return the groups of a batch, in the order in which they were trained. Raise NotFound, also if one of its episodes was
        deleted.

        They are as the lease gave them, except for the flag ORPHANED, which is current.
        """
        model = self.reader.model
        rows = await self._database.read(lambda c: decisions.trained(c, model, batch, batch + 1))
        if not rows:
            raise NotFound(f"no batch {batch} of {model!r} was trained", code="no_batch")
        entries = [as_of(row) for row in rows]
        return await self._database.read(lambda c: self.reader.read(c, entries))
