"""`/admin/v1/weights`: publishing versions; `/admin/v1/status`: how everything is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.context import Gateway, Number, require_admin
from gateway.store import episodes as statements

router = APIRouter(prefix="/admin/v1", tags=["Weights"], dependencies=[Depends(require_admin)])


class PublishBody(BaseModel):
    """A version, in a directory that the gateway and its engines can read."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=1, lt=2**31)
    path: str = Field(min_length=1)
    model: str | None = None
    """A trained model; the first one, if none is named."""


@router.post("/weights")
async def publish(
    body: PublishBody, gateway: Gateway, wait: Annotated[float, Query(ge=0, le=3600)] = 0.0
) -> dict[str, Any]:
    """Checks the manifest and updates the engines; answers the version's record."""
    return await gateway.models.one(body.model).versions.publish(body.version, Path(body.path), wait)


@router.get("/weights/{version}")
async def get_version(version: Number, gateway: Gateway, model: str | None = None) -> dict[str, Any]:
    """A version's state, parent, path, and what each step of its update took."""
    return await gateway.models.one(model).versions.version(version)


@router.get("/status")
async def status(gateway: Gateway, model: str | None = None) -> dict[str, Any]:
    """A trained model's newest version and the ledger's buffers; every engine, and totals."""
    found = gateway.models.trained(model)
    newest = await found.versions.newest()
    ledger, pools = found.ledger.ledger, [m.pool for m in gateway.models]
    return {
        "model": found.name,
        "models": list(gateway.settings.models),
        "version": ledger.version,
        "newest_version": newest,
        "weights": found.versions.current.path,
        "orphaned_versions": sorted(found.versions.orphans),
        "consumed": ledger.consumed,
        "free_slots": ledger.free_slots(),
        "buffers": [asdict(row) for row in ledger.buffers()],
        "engines": [engine for pool in pools for engine in pool.describe()],
        "waiting_calls": sum(pool.waiting for pool in pools),
        "open_episodes": gateway.episodes.open_count,
        "updates": found.versions.updates,
        "streams_across_updates": found.versions.streams_across_updates,
        "episodes": await gateway.database.read(statements.count_by_state),
    }
