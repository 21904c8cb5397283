"""`/admin/v1/leases`: the trainer's feed; `/admin/v1/batches`: what was trained.

Groups travel as an Arrow stream of `headgate.arrow.FEED_SCHEMA`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.admin.feed_responses import (
    ARROW,
    COMPLETE,
    CURSOR,
    FEED_HEADERS,
    LeaseName,
    TrainedBatch,
    TrainedBatches,
    serve_feed,
)
from gateway.api.context import Number
from headgate.types import Lease, LeasedGroups

router = admin_router("Batches", "", serve_feed)


class Body(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class LeaseBody(Body):
    """A lease's consumer and its trained model. The same consumer may take its own lease over."""

    consumer: str = Field(min_length=1, max_length=255)
    model: str | None = None


Model = Annotated[str | None, Query(description="A trained model; the first one by default.")]


class FenceBody(Body):
    """The fencing number of the lease."""

    fence: Number


class AckBody(FenceBody):
    """The checkpoint that holds the batch's effect."""

    checkpoint: str


class NackBody(FenceBody):
    """The reason why the batch was not trained."""

    reason: str = ""


@router.post("/leases")
async def lease(body: LeaseBody, access: Admin) -> Lease:
    """Lease the next batch to train, whole or not yet."""
    return await access.trained(body.model).leases.lease(body.consumer)


@router.get("/leases/{lease_id}/groups", response_class=Response, responses=ARROW)
async def groups(
    lease_id: str,
    access: Admin,
    fence: Number,
    cursor: Annotated[int, Query(ge=0)] = 0,
    wait: Annotated[float, Query(ge=0, le=3600)] = 0.0,
    model: Model = None,
) -> Response:
    """Return the groups after `cursor`, as an Arrow stream; headers name the next cursor and whether the batch is whole."""
    leased = await access.trained(model).leases.groups(lease_id, fence, cursor, wait)
    return await _stream(leased)


@router.post("/leases/{lease_id}/renew")
async def renew(lease_id: str, body: FenceBody, access: Admin, model: Model = None) -> LeaseName:
    """Restart the lease's deadline."""
    await access.trained(model).leases.renew(lease_id, body.fence)
    return LeaseName(lease_id=lease_id)


@router.post("/leases/{lease_id}/ack")
async def ack(lease_id: str, body: AckBody, access: Admin, model: Model = None) -> LeaseName:
    """Mark the batch as trained."""
    await access.trained(model).leases.ack(lease_id, body.fence, body.checkpoint)
    return LeaseName(lease_id=lease_id)


@router.post("/leases/{lease_id}/nack")
async def nack(lease_id: str, body: NackBody, access: Admin, model: Model = None) -> LeaseName:
    """Give the batch back untrained; the next lease is of the same batch."""
    await access.trained(model).leases.nack(lease_id, body.fence, body.reason)
    return LeaseName(lease_id=lease_id)


@router.get("/batches")
async def batches(access: Admin, model: Model = None) -> TrainedBatches:
    """Return the trained batches, in order: batch, groups, trained_at."""
    found = access.shown(model)
    trained = [TrainedBatch(**batch) for batch in await found.batches.list()]
    return TrainedBatches(model=found.name, batches=trained)


@router.get("/batches/{batch}/groups", response_class=Response, responses=ARROW)
async def batch_groups(batch: Number, access: Admin, model: Model = None) -> Response:
    """Return the groups of a trained batch, as the lease gave them and in that order; the headers are those of a lease.

    Only the flag ORPHANED may differ: it is current.
    """
    groups = await access.shown(model).batches.groups(batch)
    return await _stream(LeasedGroups(groups, len(groups), True))


async def _stream(leased: LeasedGroups) -> Response:
    headers = {
        **FEED_HEADERS,
        CURSOR: str(leased.cursor),
        COMPLETE: "true" if leased.complete else "false",
    }
    body = await asyncio.to_thread(_arrow, leased)
    return Response(body, headers=headers, media_type="application/vnd.apache.arrow.stream")


def _arrow(leased: LeasedGroups) -> bytes:
    from headgate.arrow import write_stream  # pyarrow takes 40 MiB, and not every gateway has a trainer

    return write_stream(leased.groups)
