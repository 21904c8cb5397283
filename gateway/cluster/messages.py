"""The messages between a follower and the coordinator: JSON objects over their link, in order in each direction.

After `welcome` the coordinator sends requests (`do` with an `id`, which the follower acknowledges by `done`), responses
(`response`) and tables (`table`), by which a follower places its calls. After `hello` a follower sends requests for episodes
(`ask` with an `id`) and reports. Tables and reports are not acknowledged.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, TypedDict

import orjson

from gateway.episodes.open_episode import OpenEpisode
from gateway.generation.plan_messages import CallCounts, Table
from gateway.generation.pool import EnginePool
from gateway.generation.slot import Slot
from gateway.generation.slot_state import SlotState
from headgate import errors
from headgate.errors import Busy, GatewayError
from headgate.types import EpisodeMode, EpisodeSampling
from scheduler.policies.throughput import EngineModel
from scheduler.program.calls import EngineLoad, PeerLoad, PeerQueued, PeerRunning, Plan

Message = dict[str, Any]
"""A message of any kind."""


class SlotMessage(TypedDict):
    """An engine, as the coordinator reports it to followers."""

    model: str
    name: str
    url: str | None
    api: str
    external: bool
    state: SlotState
    reason: str
    version: int
    generation: int
    settled: bool
    zone: str


class EpisodeMessage(TypedDict):
    """An open episode, as the coordinator reports it to followers."""

    id: str
    task_id: str
    group_id: str
    mode: EpisodeMode
    model: str
    version: int
    sampling: dict[str, Any]
    attempt: int


Runs = dict[str, list[int]]
"""Requests in each engine, and how many of them cannot move."""


def pack(message: Message) -> str:
    """Return a message as text."""
    return orjson.dumps(message).decode()


def unpack(text: str | bytes) -> Message:
    found: Message = orjson.loads(text)
    return found


def slot_to_json(model: str, slot: Slot, api: str) -> SlotMessage:
    """Return an engine's state for followers."""
    return {
        "model": model,
        "name": slot.name,
        "url": slot.url,
        "api": api,
        "external": slot.external_url is not None,
        "state": slot.state,
        "reason": slot.reason,
        "version": slot.version,
        "generation": slot.generation,
        "settled": slot.settled,
        "zone": slot.zone,
    }


def runs_to_json(pool: EnginePool) -> Runs:
    """Return the calls that run in a model's engines for this process."""
    return {slot.name: [slot.streams, slot.pinned] for slot in pool.slots.values()}


def counts_to_json(counts: CallCounts) -> Message:
    """Return a process's calls of a model, for its report."""
    return {"queued": counts.queued, "running": counts.running}


def counts_from_json(values: Message) -> CallCounts:
    """Return the counts of a report."""
    return CallCounts(tuple(map(tuple, values["queued"])), tuple(map(tuple, values["running"])))


def table_to_json(table: Table) -> Message:
    """Return a table as rows."""
    plan, peer_load = table.plan, table.peer_load
    return {
        "engines": [[e.engine, e.running, e.waiting, e.kv, e.tokens_per_s] for e in table.engines],
        "speeds": {name: astuple(model) for name, model in table.speeds.items()},
        "plan": [plan.newest, plan.pulling],
        "processes": peer_load.processes,
        "queued": [[q.version, q.calls, q.length] for q in peer_load.queued],
        "running": [[h.engine, h.version, h.calls] for h in peer_load.running],
    }


def table_from_json(values: Message) -> Table:
    newest, pulling = values["plan"]
    queued = tuple(PeerQueued(*row) for row in values["queued"])
    running = tuple(PeerRunning(*row) for row in values["running"])
    return Table(
        tuple(EngineLoad(*row) for row in values["engines"]),
        Plan(newest, tuple(pulling)),
        {name: EngineModel(*row) for name, row in values["speeds"].items()},
        PeerLoad(values["processes"], queued, running),
    )


def episode_to_json(live: OpenEpisode) -> EpisodeMessage:
    """Return an open episode for followers."""
    return {
        "id": live.id,
        "task_id": live.task_id,
        "group_id": live.group_id,
        "mode": live.mode,
        "model": live.model,
        "version": live.version,
        "sampling": live.sampling.stored() or {},
        "attempt": live.attempt,
    }


def episode_from_json(values: EpisodeMessage, now: float) -> OpenEpisode:
    """Return an open episode that the coordinator reports."""
    return OpenEpisode(
        id=values["id"],
        task_id=values["task_id"],
        group_id=values["group_id"],
        mode=values["mode"],
        model=values["model"],
        opened_at=now,
        last_used_at=now,
        version=values["version"],
        sampling=EpisodeSampling(**values["sampling"]),
    )


def error_to_json(error: GatewayError) -> Message:
    """Return an error, to be raised by the receiver."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "code": error.code,
        "param": error.param,
        "retry_after": error.retry_after,
    }


def error_from_json(values: Message) -> GatewayError:
    """Return the error of a message; a plain GatewayError if its type is unknown."""
    kind = getattr(errors, values["error"], GatewayError)
    if isinstance(kind, type) and issubclass(kind, Busy):
        return kind(values["message"], retry_after=values["retry_after"] or 1.0, code=values["code"])
    if not (isinstance(kind, type) and issubclass(kind, GatewayError)):
        kind = GatewayError
    return kind(values["message"], code=values["code"], param=values["param"])
