"""A gateway with several models, each on a fake engine of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.engines.fake import FakeEngine, create_fake_app
from scheduler.cluster.local import free_port
from tests.gateways import RunningGateway, run_gateway, serve, settings_for

Engines = dict[str, FakeEngine]


@asynccontextmanager
async def gateway_of(
    model: Path, work: Path, models: dict[str, dict[str, Any]], **overrides: Any
) -> AsyncIterator[tuple[RunningGateway, Engines]]:
    """A gateway whose models have a fake engine each, in this event loop."""
    staleness = {"batch": 1, "eta": 0, "min_members": 1}
    values = settings_for(model, work, **{"staleness": staleness, **overrides})
    async with AsyncExitStack() as stack:
        engines: Engines = {}
        for name, given in models.items():
            engines[name], port = FakeEngine("none"), free_port()
            await stack.enter_async_context(serve(create_fake_app(engines[name]), port))
            engine = {"launch": "external", "url": f"http://127.0.0.1:{port}"}
            models[name] = {"path": str(model), "engine": engine, **given}
        values["models"] = models
        yield await stack.enter_async_context(run_gateway(values, in_process=False)), engines
