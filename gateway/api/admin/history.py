"""`/admin/v1/versions`, `/admin/v1/timeline`: what engines, nodes and versions went through; `/admin/v1/health`: is the run well?

And `/admin/v1/console`: what the holder of a key may see. All of it is read from SQL, so a recorded run responds too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import Connection

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.admin.trainer_steps import OfModel, model_in_reach
from gateway.observe import signals
from gateway.observe.timeline import spans
from gateway.store import canaries, decisions, episode_pages, events, history, trainer_steps
from gateway.store.episode_pages import EpisodeFilter
from scheduler.policies import limits
from scheduler.policies.canary import fell

router = admin_router("History")

OfRun = Annotated[str | None, Query(max_length=255, description="The trainer's name for its run.")]
Moment = Annotated[float | None, Query(ge=0, lt=1e12, description="Seconds since 1970.")]
_LOOKED_AT = 200
"""The newest episodes by whose calls truncation is judged."""
_DECISIONS = 10_000
"""The newest decisions by whose groups it is judged whether groups can be trained."""
_STEPS = 200
"""The newest steps in which a figure is looked for."""
Steps = Sequence[tuple[int, Mapping[str, float]]]
"""Steps with their figures, in order; one that not every step has is of the last step that has it."""
_COMPARED = 200, 1000
"""The newest live rewards, and those before that they are compared with."""
_FAILURES = ("engine.quarantined", "engine.dead")


@router.get("/console")
async def console(access: Admin) -> dict[str, Any]:
    """Return the models and agents within reach of the key, and whether this is a recorded run, in which nothing can be
    changed. `now` is, of a recorded run, its last event."""
    gateway, reach = access.gateway, access.reach
    settings = gateway.settings
    return {
        "project": reach.project,
        "recorded": bool(gateway.run_folders),
        "version": version("headgate"),
        "models": [{"name": name, "trained": settings.models[name].train} for name in reach.models],
        "agents": [name for name in settings.agents if reach.has(settings.model_of(name))],
        "now": await _now(access),
    }


@router.get("/versions")
async def list_versions(access: Admin, model: OfModel = None) -> dict[str, Any]:
    """Return a model's versions, the oldest first: state, parent, path, when it was published and live, and what its update
    took."""
    name = await model_in_reach(access, model)

    def read(connection: Connection) -> dict[str, Any]:
        found = history.versions(connection, name)
        events = history.machine_events(connection, ["version"], (name,))
        live = {event.data["version"]: event.at for event in events if event.kind == "version.live"}
        return {"model": name, "versions": [{**v, "live_at": live.get(v["version"])} for v in found]}

    return await access.gateway.database.read(read)


@router.get("/timeline")
async def timeline(
    access: Admin, since: Moment = None, until: Moment = None, model: OfModel = None
) -> dict[str, Any]:
    """Return the states of engines and the roles of nodes over time, with when versions came; the root key alone gets nodes."""
    models = None if access.reach.everything else access.reach.models
    if model is not None:
        models = (await model_in_reach(access, model),)
    subjects = ["engine", "version"]
    events = await access.gateway.database.read(lambda c: history.machine_events(c, subjects, models))
    if access.reach.everything:
        events += await access.gateway.database.read(lambda c: history.machine_events(c, ["node"]))
    first = events[0].at if events else None
    last = until if until is not None else await _now(access)
    return {"from": since if since is not None else first, "to": last, **spans(events, since, until)}


async def _now(access: Access) -> float:
    """Return the end of the known time: now, or a recorded run's last event."""
    if not access.gateway.run_folders:
        return time.time()
    newest = await access.gateway.database.read(lambda c: events.before(c, 2**53, 1))
    return newest[-1].at if newest else time.time()


@router.get("/health")
async def health(access: Admin, model: OfModel = None, run: OfRun = None) -> dict[str, Any]:
    """Return the checklist of a run: each signal with its value now, what is healthy, and what to do; and what limits the run.

    `run`: the trainer's run whose steps are judged; the newest, if none is named. `at` is now, of a recorded run its last event.
    """
    name = await model_in_reach(access, model)
    slow = len(access.gateway.view.slow_episodes(name))
    steps = await access.gateway.database.read(lambda c: trainer_steps.newest(c, name, _STEPS, run))
    agents = access.gateway.settings.live_agents_of(name)
    judged = await access.gateway.database.read(lambda c: _judged(c, name, steps, slow, agents))
    limiting = limits.to_json([figures for _, figures in steps])
    return {"model": name, "at": await _now(access), "signals": judged, "limits": limiting}


def _judged(
    connection: Connection, model: str, steps: Steps, slow: int, agents: frozenset[str]
) -> list[dict[str, Any]]:
    figures = {name: (value, step) for step, of in steps for name, value in of.items()}
    wanted = EpisodeFilter(model=model, mode="train")
    newest = episode_pages.list_episodes(connection, wanted, _LOOKED_AT)
    calls = episode_pages.calls_of(connection, [row["id"] for row in newest]).values()
    return signals.judge(
        signals.StepFigures(figures, trained=bool(steps)),
        episode_pages.reasons(connection, model),
        sum(row["calls"] for row in calls),
        sum(row["truncated"] for row in calls),
        history.faulty_calls(connection, model),
        sum(e.kind in _FAILURES for e in history.machine_events(connection, ["engine"], (model,))),
        decisions.ended_groups(connection, model, _DECISIONS),
        slow,
        _fall(canaries.live_rewards(connection, model, agents, sum(_COMPARED))) if agents else None,
    )


def _fall(newest_first: Sequence[float]) -> float | None:
    """Return by which share of their range the newest live rewards are lower than those before, if that is not chance."""
    newest, before = newest_first[: _COMPARED[0]], newest_first[_COMPARED[0] :]
    if len(before) < _COMPARED[0]:
        return None
    history, now, lower = fell(before, newest)
    if not lower or history.value is None or now.value is None:
        return 0.0
    return (history.value - now.value) / (history.high - history.low)
