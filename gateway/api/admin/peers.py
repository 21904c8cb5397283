"""`/peers/v1/link`: where the other gateway processes of a cluster link to their coordinator. Not for other clients."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from gateway.cluster.follower import LINK
from headgate.keys import Keyring

router = APIRouter()

_NOT_ALLOWED, _NOT_COORDINATOR = 4401, 4409


@router.websocket(LINK)
async def link(wire: WebSocket) -> None:
    """Serve a follower's link. Refuse it without the cluster's key, and in a process that is not the coordinator."""
    services = wire.app.state.services
    key = services.settings.cluster.key
    given = wire.headers.get("authorization", "").removeprefix("Bearer ")
    await wire.accept()
    if key is None or not Keyring([(key.get_secret_value(), True)]).find(given):
        await wire.close(_NOT_ALLOWED, "the link needs the key in [cluster] key")
        return
    if not services.hub.coordinates:
        await wire.close(_NOT_COORDINATOR, "this process is not the coordinator")
        return
    with contextlib.suppress(WebSocketDisconnect):
        await services.hub.serve(wire)
