"""The stored versions of one model, as every process and a recorded run can read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.control.canaries import ended_trials
from gateway.store import ledger as statements
from gateway.store.database import Database
from gateway.updates.weights_check import Weights
from headgate.errors import NotFound


class VersionRecords:
    """The stored versions of a model."""

    def __init__(self, model: str, path: Path, database: Database) -> None:
        """`path`: the first version's checkpoint."""
        self.model = model
        self.current = Weights(0, str(path.resolve()))
        self.orphans: frozenset[int] = frozenset()
        """Versions that the newest does not descend from; also such as failed, for an engine may have sampled before that."""
        self.streams_across_updates = 0
        self.updates = 0
        self._database = database

    async def newest(self) -> int:
        """Return the greatest number that was ever published, live or not."""
        row = await self._database.read(lambda c: statements.newest_version(c, self.model))
        return row["version"] if row is not None else self.current.version

    async def bad(self) -> dict[int, str]:
        """Return the versions that no engine may run, and why."""
        return await self._database.read(lambda c: statements.bad_versions(c, self.model))

    async def version(self, number: int) -> dict[str, Any]:
        """One version's record. `why`: why it is not live, in one sentence. Raise NotFound."""
        row = await self._database.read(lambda c: statements.version(c, self.model, number))
        if row is None:
            raise NotFound(f"no version {number} of {self.model!r}", code="no_version")
        failures = [
            f"{report['engine']}: {report['failure']}" for report in row["report"] if report["failure"]
        ]
        why = row["bad"] or ("; ".join(failures) or "no engine loaded it") * (row["state"] == "failed")
        return {**row, "bad": bool(row["bad"]), "why": why}

    async def trials(self) -> dict[str, Any]:
        """Return the trials of versions that have ended; of a run that goes on also the running one (`Canaries.describe`)."""
        ended = await ended_trials(self._database, self.model)
        return {"model": self.model, "share": 0.0, "conversations": 0, "running": None, "ended": ended}
