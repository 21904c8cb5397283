"""`/`, `/healthz`, `/readyz`, `/metrics`; `/health`, `/ping`, `/version`: what tools for vLLM ask before they begin."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.api.context import Gateway
from gateway.api.middleware.drain import stopping
from gateway.api.query import QueryRoute
from gateway.cluster.role import Coordinator
from headgate.errors import Unavailable

router = APIRouter(tags=["Health"], route_class=QueryRoute)


@router.get("/", include_in_schema=False)
async def root() -> dict[str, str]:
    """Identify the gateway to clients that request it before their first call, and explain what to do next."""
    return {"name": "headgate", "api": "/v1", "schema": "/openapi.json", "docs": "/docs"}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Report that the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request, gateway: Gateway) -> dict[str, str]:
    """Call would be served: the process is not being stopped, the store writes, and an engine is open or will be in a moment."""
    if request.app.state.drain.stopping:
        raise stopping()
    gateway.database.check()
    if not gateway.database.reachable:
        raise Unavailable(
            "the database does not respond: calls wait for it", retry_after=5.0, code="store_down"
        )
    gateway.membership.check()
    if isinstance(gateway.role, Coordinator):
        _check_coordinator(gateway.role)
    for model in gateway.models:
        if not model.pool.ready:
            message = f"no engine is ready ({model.pool.states()})"
            raise Unavailable(message, retry_after=10.0, code="no_engine")
    return {"status": "ready"}


@router.get("/health")
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(request: Request, gateway: Gateway) -> Response:
    """Return whether a call would be served, as `/readyz` does: 200 without a body, as vLLM responds."""
    await readyz(request, gateway)
    return Response()


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Return the version of headgate, in vLLM's form."""
    return {"version": version("headgate")}


def _check_coordinator(coordinator: Coordinator) -> None:
    if not coordinator.host.running:
        raise Unavailable("the control program has ended", retry_after=30.0, code="control_down")
    for model in coordinator.models.trained:
        if model.ledger.broken is not None:
            raise Unavailable(model.ledger.broken, retry_after=30.0, code="ledger_broken")


@router.get("/metrics", response_class=Response)
async def prometheus(gateway: Gateway) -> Response:
    """Return all metrics as Prometheus text."""
    return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)
