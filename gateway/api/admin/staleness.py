"""`/admin/v1/staleness`: the ledger as a table; `/admin/v1/episodes/{id}/why`: what became of an episode, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection

from gateway.api.access import Admin
from gateway.api.admin.admin_route import admin_router
from gateway.api.admin.batches import Model
from gateway.observe.explain import because, explain, verdict, with_refusals
from gateway.render.tool_alarm import WORDS
from gateway.store import decisions, episode_pages, episodes, refused_calls, turns
from gateway.store.records import DecisionRecord, EpisodeRecord
from gateway.training_feed.decision_log import Entry
from headgate.errors import NotFound
from scheduler.policies.staleness_state import GroupRow

router = admin_router("Staleness")

_LOST = ("refused", "dropped", "aborted", "skipped")
_OF_LATE = 10_000


@router.get("/staleness")
async def staleness(access: Admin, model: Model = None) -> dict[str, Any]:
    """Return a trained model's ledger: its batches as rows, with the groups in them; waiting groups; recent losses and their
    reasons."""
    gateway, found = access.gateway, access.shown(model)
    ledger, settings = found.ledger.rule, gateway.settings.staleness_of(found.name)
    groups: dict[int, list[dict[str, Any]]] = {}
    for group in ledger.groups():
        if group.state != "dropped":
            groups.setdefault(group.batch, []).append(_group(group))
    return {
        "model": found.name,
        "late_groups": settings.late_groups,
        "eta": settings.eta,
        "batch_size": settings.batch,
        "version": ledger.version,
        "consumed": ledger.next_batch,
        "lease": found.leases.current(),
        "batches": [{**asdict(row), "groups": groups.get(row.batch, [])} for row in ledger.batches()],
        "slowest": await gateway.database.read(lambda c: episode_pages.slowest_groups(c, found.name)),
        "waiting": gateway.view.waiting(found.name),
        "lost": await gateway.database.read(lambda c: decisions.counts(c, found.name, _LOST, _OF_LATE)),
    }


@router.get("/episodes/{episode_id}/why")
async def why(episode_id: str, access: Admin) -> dict[str, Any]:
    """Return the decisions about an episode and its group with its refused calls, in order, and the verdict; also of an episode
    that was refused."""
    gateway = access.gateway
    row, rows = await gateway.database.read(
        lambda c: (episodes.episode(c, episode_id), decisions.of_episode(c, episode_id))
    )
    model = _model_of(episode_id, row, rows)
    if not model or not access.reach.has(model):
        raise NotFound(f"no decision is recorded for an episode {episode_id!r}", code="no_episode")
    rows = [
        decided for decided in rows if decided["model"] == model
    ]  # groups of other models may have the same name
    story = explain(rows, episode_id) if rows else []
    batch = next((s["batch"] for s in reversed(story) if s["kind"] in ("trained", "occupied")), -1)
    entry = Entry("", 0, batch, [episode_id])
    reader = access.shown(model).batches.reader

    def tokens(connection: Connection) -> tuple[int, Counter[str]]:
        sampled = sum(len(turn.flags) for turn in turns.sampled(connection, model, [episode_id]))
        return sampled, reader.masks(connection, [entry])[episode_id]

    sampled, masked = await gateway.database.read(tokens)
    faulty, refused = await gateway.database.read(
        lambda c: (turns.tool_faults(c, episode_id), refused_calls.of_episode(c, episode_id))
    )
    notice = row["notice"] if row is not None else ""
    return {
        "episode_id": episode_id,
        "group_id": row["group_id"] if row is not None else rows[0]["group_id"],
        "model": model,
        "agent": row["agent"] if row is not None else "",
        "notice": notice,
        "notice_words": because(notice),
        "error": row["error"] if row is not None else "",
        "verdict": verdict(episode_id, row, story, sampled, masked.total()),
        "sampled_tokens": sampled,
        "masked_tokens": dict(masked),
        "tool_faults": [
            {"call_id": call, "faults": faults, "words": [WORDS[fault] for fault in faults]}
            for call, faults in faulty.items()
        ],
        "story": with_refusals(story, refused),
    }


def _model_of(episode_id: str, row: EpisodeRecord | None, rows: list[DecisionRecord]) -> str:
    """Return the model of an episode, opened or refused; "" if the episode is unknown."""
    if row is not None:
        return row["model"]
    return next((decided["model"] for decided in rows if decided["episode_id"] == episode_id), "")


def _group(group: GroupRow) -> dict[str, Any]:
    members = Counter(group.members.values())
    shown = {"group_id": group.group_id, "version": group.version, "state": group.state, "size": group.size}
    return {**shown, "members": dict(sorted(members.items()))}
