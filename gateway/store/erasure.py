"""Statements that erase what conversations contain, and keep their numbers.

What is erased: tokens, log-probabilities, experts, images, parameters and metadata, requests to upstream models, stored
responses, refusals, errors, and events. What stays: ids, times, counts, versions, rewards, and decisions about the group.

Invariants: an episode is erased whole, in one transaction; no trainer can train its tokens from then on (`deleted`), while its
group and its reward stay what they were; to erase again changes nothing. A deletion is stored before anything is erased,
and forgets whom it was for in the transaction that ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from sqlalchemy import (
    Connection,
    Table,
    bindparam,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from gateway.store import images, retention
from gateway.store.columns import portions
from gateway.store.models import (
    CallRow,
    DecisionRow,
    DeletionRow,
    EpisodeRow,
    EventRow,
    ExchangeRow,
    ImageUseRow,
    LeaseRow,
    NodeRouteRow,
    NodeRow,
    RefusedCallRow,
    ResponseRow,
    RetryRow,
)
from gateway.store.retention import Place
from gateway.store.trainer_steps import of_version
from headgate.types import DELETED

_TABLE = DeletionRow.__table__
PORTION = 20
"""Episodes that one transaction erases."""
_NODE = NodeRow.__table__.c
_USER = (("user",), ("safety_identifier",), ("metadata", "user_id"), ("metadata", "user"))
"""Where the dialects' requests have the id of a user."""
_OVERWRITE = (
    update(cast(Table, NodeRow.__table__))
    .where(
        _NODE.episode_id == bindparam("of_episode"),
        _NODE.model == bindparam("of_model"),
        _NODE.index == bindparam("at_index"),
    )
    .values(ids=bindparam("zero_ids"), logprobs=bindparam("zero_logprobs"), kept=None, mask_reason=DELETED)
)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A request to delete conversations; the fields are those of `DeletionRow`."""

    id: str
    at: float
    done_at: float | None
    agent: str
    users: list[str]
    """The user's id, in the forms in which it may be stored; empty: all users of the agent, or the deletion is done."""
    episodes: list[str]


def add(connection: Connection, deletion: Deletion) -> None:
    """Store a deletion that begins."""
    connection.execute(insert(DeletionRow).values(asdict(deletion)))


def deletions(connection: Connection, *, unfinished: bool = False, limit: int = 100) -> list[Deletion]:
    """Return the newest deletions, or those that are not done."""
    query = select(*_TABLE.c).order_by(_TABLE.c.at.desc()).limit(limit)
    if unfinished:
        query = query.where(_TABLE.c.done_at.is_(None))
    return [Deletion(**row) for row in connection.execute(query).mappings()]


def found(connection: Connection, deletion: Deletion) -> dict[str, str]:
    """Return the episodes that a deletion is about and that are not erased, with their states."""
    own = [EpisodeRow.agent == deletion.agent, EpisodeRow.created_at <= deletion.at]
    if deletion.users:
        requested: Any = CallRow.__table__.c.requested
        places = [requested[path if len(path) > 1 else path[0]].as_string() for path in _USER]
        of_user = select(CallRow.episode_id).where(or_(*(place.in_(deletion.users) for place in places)))
        own.append(EpisodeRow.id.in_(of_user))
    rows = connection.execute(select(EpisodeRow.id, EpisodeRow.state).where(*own))
    erased = set(deletion.episodes)
    return {row.id: row.state for row in rows if row.id not in erased}


def erase(connection: Connection, deletion_id: str, episode_ids: Sequence[str]) -> None:
    """Erase closed episodes, and note them in their deletion."""
    for episode_id in episode_ids:
        wipe(connection, episode_id)
    query = select(_TABLE.c.episodes).where(_TABLE.c.id == deletion_id)
    listed = connection.scalar(query) or []
    values = {"episodes": [*listed, *episode_ids]}
    connection.execute(update(DeletionRow).where(_TABLE.c.id == deletion_id).values(values))


def expired(
    connection: Connection, agent: str, before: float, after: Place | None
) -> tuple[list[str], Place | None]:
    """Return some of an agent's episodes that were closed before a moment, are not erased, and are needed for no batch.

    Also where to continue (None: nothing is left).
    """
    own = (EpisodeRow.agent == agent, EpisodeRow.closed_at < before, EpisodeRow.notice != DELETED)
    query = select(EpisodeRow.closed_at, EpisodeRow.id).where(*own)
    if after is not None:
        query = query.where(tuple_(EpisodeRow.closed_at, EpisodeRow.id) > tuple_(*after))
    rows = connection.execute(query.order_by(EpisodeRow.closed_at, EpisodeRow.id).limit(PORTION)).all()
    closed = retention.closed_among(connection, [row.id for row in rows])
    free = [one.row["id"] for one in closed if one.needed not in ("group", "checkpoint")]
    return free, (rows[-1].closed_at, rows[-1].id) if len(rows) == PORTION else None


def expire(connection: Connection, deletion: Deletion) -> None:
    """Erase the episodes of a deletion that is done with them, as a part of the one of its id."""
    if connection.scalar(select(_TABLE.c.id).where(_TABLE.c.id == deletion.id)) is None:
        add(connection, replace(deletion, episodes=[]))
    erase(connection, deletion.id, deletion.episodes)


def wipe(connection: Connection, episode_id: str) -> None:
    """Erase what a closed episode contains."""
    query = select(_NODE.model, _NODE.index, func.length(_NODE.ids), func.length(_NODE.logprobs))
    rows = connection.execute(query.where(_NODE.episode_id == episode_id)).all()
    zeros = [
        {
            "of_episode": episode_id,
            "of_model": model,
            "at_index": index,
            "zero_ids": bytes(ids),
            "zero_logprobs": bytes(logprobs),
        }
        for model, index, ids, logprobs in rows
    ]
    if zeros:
        connection.execute(_OVERWRITE, zeros)
    calls = select(CallRow.id).where(CallRow.episode_id == episode_id)
    connection.execute(delete(ExchangeRow).where(ExchangeRow.call_id.in_(calls)))
    used = images.used_by(connection, [episode_id])
    for table in (NodeRouteRow, ImageUseRow, RefusedCallRow, RetryRow, ResponseRow, EventRow):
        connection.execute(delete(table).where(table.__table__.c.episode_id == episode_id))
    images.delete_unused(connection, used)
    empty: dict[str, Any] = {"requested": {}, "digest": b"", "request_key": "", "open_to": None}
    connection.execute(update(CallRow).where(CallRow.episode_id == episode_id).values(empty))
    values = {"details": {}, "error": "", "notice": DELETED, "key_hash": f"{DELETED}:{episode_id}"}
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(values))
    own = (DecisionRow.episode_id == episode_id, DecisionRow.kind.in_(("dropped", "aborted", "refused")))
    connection.execute(update(DecisionRow).where(*own).values(details={}))


def finish(connection: Connection, deletion_id: str, now: float) -> None:
    """End a deletion, and forget whom it was for."""
    values = {"done_at": now, "users": []}
    connection.execute(update(DeletionRow).where(_TABLE.c.id == deletion_id).values(values))


def learned(connection: Connection, episode_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the versions that were trained from some episodes, each with its model, batch, number of these episodes, and the run
    and step of the trainer, if it reported them."""
    batches: dict[tuple[str, int], int] = {}
    for model, batch in _trained(connection, episode_ids):
        batches[model, batch] = batches.get((model, batch), 0) + 1
    rows = []
    for (model, batch), episodes in sorted(batches.items()):
        step = of_version(connection, model, batch + 1) or {"run": None, "step": None}
        row = {"model": model, "version": batch + 1, "batch": batch, "episodes": episodes}
        rows.append({**row, "run": step["run"], "step": step["step"]})
    return rows


def leased(connection: Connection, episode_ids: Collection[str]) -> list[dict[str, Any]]:
    """Return the leased batches that have some episodes: their trainer may have read them before they were erased."""
    groups: set[tuple[str, str]] = set()
    for some in portions(sorted(episode_ids)):
        members = select(EpisodeRow.model, EpisodeRow.group_id).where(EpisodeRow.id.in_(some))
        groups |= {(row.model, row.group_id) for row in connection.execute(members)}
    rows = set()
    for some in portions(sorted({group for _, group in groups})):
        query = (
            select(DecisionRow.model, DecisionRow.group_id, LeaseRow.batch)
            .join(LeaseRow, (LeaseRow.model == DecisionRow.model) & (LeaseRow.batch == DecisionRow.batch))
            .where(DecisionRow.group_id.in_(some), DecisionRow.kind == "occupied", LeaseRow.state == "held")
        )
        found = connection.execute(query)
        rows |= {(row.model, row.batch) for row in found if (row.model, row.group_id) in groups}
    return [{"model": model, "batch": batch, "version": batch + 1} for model, batch in sorted(rows)]


def _trained(connection: Connection, episode_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Return the model and the batch of each of some episodes that was trained; also of those whose rows are deleted."""
    pairs: list[tuple[str, int]] = []
    for some in portions(episode_ids):
        found = retention.closed_among(connection, some)
        pairs += [(one.row["model"], one.batch) for one in found if one.batch is not None]
        gone = select(DecisionRow.model, DecisionRow.batch).where(
            DecisionRow.episode_id.in_(some),
            DecisionRow.kind == literal("deleted", literal_execute=True),
            DecisionRow.batch.is_not(None),
        )
        pairs += [(row.model, row.batch) for row in connection.execute(gone)]
    return pairs
