"""`/admin/v1/weights`: publishing versions; `/admin/v1/status`: how everything is."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.admin.feed_responses import VersionState
from gateway.api.context import Number
from gateway.store import episodes as statements
from gateway.store import trainer_steps
from headgate.errors import BadRequest, Unprocessable
from scheduler.policies import limits

router = admin_router("Weights")
_SLOW = 8
"""The slow episodes that the status names, the next to be closed first."""


class PublishBody(BaseModel):
    """A version: in a directory that the gateway and its engines can read, or at a server of `[weights] sources`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    version: int = Field(ge=1, lt=2**31)
    path: str | None = Field(None, min_length=1)
    url: str | None = Field(None, min_length=1, max_length=1024)
    """In place of `path`: the root of the server, such as `http://trainer:8100`."""
    model: str | None = None
    """A trained model; the first one, if none is named."""
    skip_batches: bool = False
    """Accept a number above the next one: the batches of the numbers between are not trained."""


@router.post("/weights")
async def publish(
    body: PublishBody, access: Admin, wait: Annotated[float, Query(ge=0, le=3600)] = 0.0
) -> VersionState:
    """Check the manifest and every tensor, and update the engines; return the version's record."""
    versions = access.one(body.model).versions
    if (body.path is None) == (body.url is None):
        raise BadRequest(
            "give the version's `path` or its `url`, not both", code="invalid_value", param="path"
        )
    if body.url is not None:
        path, source = None, _source(access, body.url)
    else:
        assert body.path is not None
        path, source = await asyncio.to_thread(_folder, access, body.path), ""
    record = await versions.publish(body.version, path, wait, source, skip_batches=body.skip_batches)
    return VersionState.model_validate(record)


@router.get("/weights/{version}")
async def get_version(version: Number, access: Admin, model: str | None = None) -> VersionState:
    """Return a version's state, parent, path, what each step of its update took, whether it is bad, and why it is not live."""
    record = await access.gateway.view.versions(model, access.reach).version(version)
    return VersionState.model_validate(record)


@router.get("/status")
async def status(access: Admin, model: str | None = None) -> dict[str, Any]:
    """Return a trained model's newest version and the ledger's batches; every engine, and totals. `trained`: what its trainer
    reported when it released its node after a batch. `limits`: what limits its run, by its newest steps and `rollout_s`."""
    gateway, reach, found = access.gateway, access.reach, access.shown(model)
    newest, bad = await found.versions.newest(), await found.versions.bad()
    ledger, pools = found.ledger.rule, [m.pool for m in access.models]
    of = None if reach.everything else reach.models
    trained = gateway.view.trained_batch(found.name)
    steps = await gateway.database.read(lambda c: trainer_steps.newest(c, found.name, limits.STEPS))
    return {
        "model": found.name,
        "models": list(reach.models),
        "version": ledger.version,
        "newest_version": newest,
        "weights": found.versions.current.path,
        "orphaned_versions": sorted(found.versions.orphans),
        "bad_versions": [{"version": number, "why": why} for number, why in bad.items()],
        "consumed": ledger.next_batch,
        "free_slots": ledger.free_slots(),
        "drop_equal": ledger.settings.drop_equal,
        "max_model_len": found.settings.max_model_len,
        "routers": found.routers and found.routers._asdict(),
        "quantization": gateway.settings.engine_of(found.name).quantization,
        "eta": ledger.settings.eta,
        "rollout_s": gateway.view.rollout_seconds(found.name),
        "limits": limits.to_json([figures for _, figures in steps]),
        "trained": asdict(trained) if trained is not None else None,
        "batches": [asdict(row) for row in ledger.batches()],
        "engines": [engine for pool in pools for engine in pool.describe()],
        "waiting_calls": sum(pool.waiting for pool in pools),
        "open_episodes": sum(map(reach.has, gateway.view.open_models())),
        "slow_episodes": [asdict(slow) for slow in gateway.view.slow_episodes(found.name)[:_SLOW]],
        "updates": found.versions.updates,
        "streams_across_updates": found.versions.streams_across_updates,
        "episodes": await gateway.database.read(lambda c: statements.count_by_state(c, of)),
        "settled": found.ledger.decision_log.totals.to_json(),
        "ended": await gateway.database.read(lambda c: statements.ended(c, found.name)),
    }


def _source(access: Access, url: str) -> str:
    """Return the server that a version is fetched from. Raise Unprocessable unless the configuration names it, and for a
    project's key, by which others' weights could be loaded."""
    source = url.rstrip("/")
    if not access.reach.everything:
        message = "url: under a project's key, versions are published as paths"
        raise Unprocessable(message, code="url_not_allowed", param="url")
    if source not in access.gateway.settings.weights.sources:
        message = f"url: {source!r} is not one of [weights] sources in the gateway's file; add it there"
        raise Unprocessable(message, code="url_not_allowed", param="url")
    return source


def _folder(access: Access, path: str) -> Path:
    """Return the folder of a version. A project's key may name paths only in its own folder, so that it cannot have other
    files read or
    load others' weights. Raise Unprocessable without looking at the path."""
    if access.reach.everything:
        return Path(path)
    own = access.gateway.settings.projects[access.reach.project].weights
    found = Path(path).resolve()
    if own is None or not found.is_relative_to(own.resolve()):
        message = "path: under a project's key, versions are published from the project's folder alone ([projects.NAME] weights)"
        raise Unprocessable(message, code="path_not_allowed", param="path")
    return found
