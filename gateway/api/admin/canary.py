"""`/admin/v1/canary`: the version that a share of the new conversations tries, and a person's decision about it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from scheduler.policies.canary import Outcome

router = admin_router("Weights")
_OUTCOMES: dict[str, Outcome] = {"promote": "promoted", "rollback": "returned"}


class ModelBody(BaseModel):
    """A trained model; the first one, if none is named."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None


@router.get("/canary")
async def get_canary(access: Admin, model: str | None = None) -> dict[str, Any]:
    """Return the share, the running trial with the figures of both versions so far, and the newest trials that have ended."""
    return await access.shown(model).versions.trials()


@router.post("/canary/{action}")
async def act(
    action: Literal["hold", "resume", "promote", "rollback"], body: ModelBody, access: Admin
) -> dict[str, Any]:
    """Hold the running trial or leave it to its test again; promote its version, or return it, which makes it bad."""
    canaries = access.trained(body.model).versions.canaries
    if action in _OUTCOMES:
        await canaries.decide(_OUTCOMES[action])
    else:
        await canaries.hold(held=action == "hold")
    return await canaries.describe()
