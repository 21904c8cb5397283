"""`/admin/v1/cluster`: the gateway processes, as the one that is asked knows them. It is answered without a coordinator too."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.api.access import Admin
from gateway.errors import NotFound
from gateway.peers import snapshot

PATH = "/admin/v1/cluster"

router = APIRouter(tags=["Cluster"])


@router.get(PATH)
async def cluster(access: Admin) -> dict[str, Any]:
    """This process's role; and the coordinator, who follows it, and its engines, as they are or were last known (`age_s`).

    For the root key alone: a cluster is not any project's.
    """
    gateway = access.gateway
    if not access.reach.everything:
        raise NotFound("there is no such route", code="not_found")
    if (control := gateway.control) is not None:
        role = "alone" if control.hub is None else "coordinator"
        return {"role": role, "coordinator": {**gateway.described(control), "age_s": 0.0}}
    assert gateway.membership is not None
    linked = gateway.follower is not None and gateway.follower.linked.is_set()
    known = await snapshot.last(gateway.bus)
    return {"role": gateway.membership.role, "linked": linked, "coordinator": known}
