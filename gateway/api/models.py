"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.api.context import Gateway

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models")
async def list_models(gateway: Gateway) -> dict[str, Any]:
    """Every model, under its own name and its aliases."""
    models = [
        {"id": name, "object": "model", "created": 0, "owned_by": "headgate"}
        for name in gateway.models.names()
    ]
    return {"object": "list", "data": models}
