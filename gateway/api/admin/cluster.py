"""`/admin/v1/cluster`: the gateway processes, as the process that serves the request knows them; works without a coordinator."""

from __future__ import annotations

from typing import Any

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from gateway.cluster import snapshot
from gateway.cluster.follower import Follower
from gateway.cluster.role import Coordinator
from headgate.errors import NotFound

PATH = "/admin/v1/cluster"

router = admin_router("Cluster")


@router.get("/cluster")
async def cluster(access: Admin) -> dict[str, Any]:
    """Return this process's role, and the coordinator with its followers and engines, as they are or were last known (`age_s`).

    For the root key only: a cluster belongs to no project.
    """
    gateway = access.gateway
    if not access.reach.everything:
        raise NotFound("no route has this path", code="not_found")
    match gateway.role:
        case Coordinator(fence=fence):
            known = {**gateway.described(fence), "age_s": 0.0}
            return {"role": gateway.membership.role, "coordinator": known}
        case Follower(linked=linked):
            last = await snapshot.last(gateway.bus)
            return {"role": gateway.membership.role, "linked": linked.is_set(), "coordinator": last}
