"""Statements about nodes of token trees and the calls that made them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    literal,
    select,
    union_all,
    update,
)

from gateway.store.clock import NOW, RESOLUTION_S
from gateway.store.columns import begins_with, portions
from gateway.store.episodes import UNFINISHED
from gateway.store.models import CallRow, EpisodeRow, ExchangeRow, NodeRow, RetryRow
from gateway.store.records import CallRecord
from gateway.store.routes import insert_routes
from headgate.errors import Conflict
from headgate.kept import Kept
from headgate.types import CRASHED_ATTEMPT, REDACTED, ImageSpan, Int32Array, Node, UInt8Array

_INSERT_NODE = insert(cast(Table, NodeRow.__table__))
_OPEN_TO = (
    select(func.nullif(EpisodeRow.agent, ""))
    .where(EpisodeRow.id == bindparam("of_episode"), EpisodeRow.state == "open")
    .scalar_subquery()
)
_INSERT_CALL = insert(cast(Table, CallRow.__table__)).values(open_to=_OPEN_TO)
_RECORDED_OR_RESTARTED = union_all(
    select(
        CallRow.episode_id,
        literal("").label("name"),
        CallRow.id.label("call_id"),
        literal(0.0).label("age_s"),
    ).where(CallRow.id.in_(bindparam("calls", expanding=True))),
    select(RetryRow.episode_id, RetryRow.name, RetryRow.call_id, NOW - RetryRow.at).where(
        RetryRow.episode_id.in_(bindparam("episodes", expanding=True)),
        RetryRow.name.in_(bindparam("names", expanding=True)),
    ),
)
"""The calls that are recorded already (without a name), and those that retries of some requests have restarted."""
_LOCKED = (
    select(EpisodeRow.id, EpisodeRow.state)
    .where(EpisodeRow.id.in_(bindparam("episodes", expanding=True)))
    .with_for_update(read=True)
)
NAME = 32
"""The length of the prefix of a request key that a request has in common with its retries."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The trained and untrained tokens of a turn. `versions` and `flags` have shape (tokens,)."""

    episode_id: str
    mask_reason: str
    versions: Int32Array
    flags: UInt8Array


Turn = tuple[Sequence[Node], CallRecord]
"""The nodes of a turn, and the row of its call."""


def insert_shared_turns(connection: Connection, turns: Sequence[tuple[Turn, float]]) -> None:
    """Store turns of episodes that other processes may write to, each with the moment at which this process received its call, by
    its monotonic clock.

    Keeps the episodes from being closed before this transaction has ended. Raise IntegrityError if another process has nodes in
    these places, and Conflict if a call is recorded already (`recorded_elsewhere`), if its episode is closed (`episode_closed`),
    or if a retry has restarted its request since (`requested_again`). An abandoned call has no client and is recorded all the
    same. Compares ages, because the clocks of hosts differ: the retry's by the database's clock, the call's by this process's.
    The retry's is measured first and may only be too low by then, so in doubt the call is refused.
    """
    calls = [call for (_, call), _ in turns]
    parameters = {"episodes": sorted({call["episode_id"] for call in calls})}
    # A process that changes what is read next locks the episode's row first
    states = {row.id: row.state for row in connection.execute(_LOCKED, parameters)}
    parameters |= {
        "calls": [call["id"] for call in calls],
        "names": sorted({*map(_request_name, calls)} - {""}),
    }
    recorded, retries = set[str](), dict[tuple[str, str], tuple[str, float]]()
    for row in connection.execute(_RECORDED_OR_RESTARTED, parameters):
        if row.name:
            retries[row.episode_id, row.name] = row.call_id, row.age_s
        else:
            recorded.add(row.call_id)
    now = time.monotonic()
    for (_, call), arrived in turns:
        episode_id, call_id = call["episode_id"], call["id"]
        if call_id in recorded:
            message = f"the call {call_id} was recorded by another gateway process"
            raise Conflict(message, code="recorded_elsewhere")
        if states.get(episode_id) == "closed":
            raise Conflict(f"episode {episode_id} is closed", code="episode_closed")
        other, age_s = retries.get((episode_id, _request_name(call)), (call_id, 0.0))
        if other != call_id and age_s <= now - arrived + RESOLUTION_S:
            raise Conflict(f"another call serves the request of {call_id}", code="requested_again")
    insert_turns(connection, [turn for turn, _ in turns])


def _request_name(call: CallRecord) -> str:
    """Return the name of the request that a call responses; empty if it responds none."""
    return "" if call["finish_reason"] == "abandoned" else str(call["request_key"][:NAME])


def restart(connection: Connection, episode_id: str, name: str, call_id: str) -> bool:
    """Make a call the new response to a request: no earlier call will be recorded as its response.

    False, and nothing changes, if the request has been served. `name`: see `NAME`.
    """
    connection.scalar(select(EpisodeRow.id).where(EpisodeRow.id == episode_id).with_for_update())
    if calls_with_reply(connection, episode_id, name):
        return False
    connection.execute(delete(RetryRow).where(RetryRow.episode_id == episode_id, RetryRow.name == name))
    values = {"episode_id": episode_id, "name": name, "call_id": call_id, "at": NOW}
    connection.execute(insert(RetryRow).values(values))
    return True


def insert_turns(connection: Connection, turns: Sequence[Turn]) -> None:
    """Store turns of episodes that no other process writes to, in the transaction that makes their replies true."""
    connection.execute(
        _INSERT_NODE,
        [
            {"episode_id": call["episode_id"], "model": call["model"], **node_values(node)}
            for nodes, call in turns
            for node in nodes
        ],
    )
    routes = [
        (call["episode_id"], call["model"], node.index, node.routes)
        for nodes, call in turns
        for node in nodes
        if node.routes is not None
    ]
    if routes:
        insert_routes(connection, routes)
    connection.execute(_INSERT_CALL, [{**call, "of_episode": call["episode_id"]} for _, call in turns])


def nodes(connection: Connection, model: str, episode_ids: Sequence[str]) -> dict[str, list[Node]]:
    """Return the nodes of some episodes that one model sampled or was given, in creation order, with how their calls ended and
    what was
    posted on them."""
    found: dict[str, list[Node]] = {episode_id: [] for episode_id in episode_ids}
    for some in portions(episode_ids):
        for row in connection.execute(_nodes(model, NodeRow.episode_id.in_(some))).mappings():
            found[row["episode_id"]].append(_node(row))
    return found


def nodes_since(connection: Connection, model: str, episode_id: str, first: int) -> list[Node]:
    """Return the nodes of one episode, from the one with the index `first` on, in the form of `nodes`."""
    query = _nodes(model, NodeRow.episode_id == episode_id, NodeRow.index >= first)
    return [_node(row) for row in connection.execute(query).mappings()]


def _nodes(model: str, *where: ColumnElement[bool]) -> Select[Any]:
    return (
        select(*NodeRow.__table__.c, CallRow.reward, CallRow.finish_reason)
        .outerjoin(CallRow, CallRow.id == NodeRow.call_id)
        .where(*where, NodeRow.model == model)
        .order_by(NodeRow.episode_id, NodeRow.index)
    )


def sampled(connection: Connection, model: str, episode_ids: Sequence[str]) -> Iterator[SampledTurn]:
    """Yield the turns that one model sampled in some episodes, without the tokens themselves."""
    columns = (NodeRow.episode_id, NodeRow.mask_reason, NodeRow.spans, NodeRow.flags)
    for some in portions(episode_ids):
        query = select(*columns).where(NodeRow.episode_id.in_(some), NodeRow.model == model, NodeRow.sampled)
        for row in connection.execute(query):
            versions, _ = _versions(row.spans)
            yield SampledTurn(row.episode_id, row.mask_reason, versions, np.frombuffer(row.flags, "u1"))


def calls(connection: Connection, episode_id: str, model: str | None = None) -> list[CallRecord]:
    """Return the calls of an episode, oldest first; of one model, or of all."""
    query = select(*CallRow.__table__.c).where(CallRow.episode_id == episode_id)
    if model is not None:
        query = query.where(CallRow.model == model)
    query = query.order_by(CallRow.received_at, CallRow.node)
    return _call_records(connection, query)


def _call_records(connection: Connection, query: Select[Any]) -> list[CallRecord]:
    return [cast(CallRecord, dict(row)) for row in connection.execute(query).mappings()]


def calls_since(connection: Connection, model: str, episode_id: str, first_node: int) -> list[CallRecord]:
    """Return the calls of an episode that ended in the nodes of one model from `first_node` on, in the order of their nodes."""
    where = (CallRow.episode_id == episode_id, CallRow.model == model, CallRow.node >= first_node)
    query = select(*CallRow.__table__.c).where(*where).order_by(CallRow.node)
    return _call_records(connection, query)


def tool_faults(connection: Connection, episode_id: str) -> dict[str, list[str]]:
    """Return the calls of an episode whose replies had faulty tool calls, oldest first, with the faults of each."""
    query = (
        select(CallRow.id, CallRow.tool_faults)
        .where(CallRow.episode_id == episode_id, CallRow.tool_faults.is_not(None))
        .order_by(CallRow.received_at)
    )
    return {row.id: row.tool_faults.split(",") for row in connection.execute(query)}


def tool_faults_since(connection: Connection, moment: float) -> Counter[str]:
    """Return the number of replies with each fault since a moment, in seconds since the epoch."""
    query = select(CallRow.tool_faults).where(CallRow.tool_faults.is_not(None), CallRow.received_at >= moment)
    return Counter(fault for row in connection.execute(query) for fault in row.tool_faults.split(","))


def set_reward(connection: Connection, episode_id: str, call_id: str, reward: float) -> None:
    """Store the reward of a call, in place of the one before."""
    where = (CallRow.id == call_id, CallRow.episode_id == episode_id)
    connection.execute(update(CallRow).where(*where).values(reward=reward))


def rewards(connection: Connection, episode_id: str) -> dict[str, float]:
    """Return the rewards of an episode's calls, by their ids."""
    query = select(CallRow.id, CallRow.reward).where(
        CallRow.episode_id == episode_id, CallRow.reward.is_not(None)
    )
    return {row.id: row.reward for row in connection.execute(query)}


def set_rewards(connection: Connection, episode_id: str, rewards: Mapping[str, float]) -> None:
    """Store the rewards of several calls, by their ids."""
    for call_id, reward in rewards.items():
        set_reward(connection, episode_id, call_id, reward)


def has_call(connection: Connection, episode_id: str, call_id: str) -> bool:
    """Return true if an episode has a recorded call of that id."""
    where = (CallRow.id == call_id, CallRow.episode_id == episode_id)
    return connection.scalar(select(CallRow.id).where(*where)) is not None


def episode_of_call(connection: Connection, call_id: str) -> str | None:
    """Return the episode of a recorded call."""
    return connection.scalar(select(CallRow.episode_id).where(CallRow.id == call_id))


def unfinished_rewards(connection: Connection) -> dict[str, dict[str, float]]:
    """Return the rewards that were posted on calls of episodes that are not closed: by episode, by call."""
    query = (
        select(CallRow.episode_id, CallRow.id, CallRow.reward)
        .join(EpisodeRow, EpisodeRow.id == CallRow.episode_id)
        .where(UNFINISHED, CallRow.reward.is_not(None))
    )
    found: dict[str, dict[str, float]] = {}
    for row in connection.execute(query).mappings():
        found.setdefault(row["episode_id"], {})[row["id"]] = row["reward"]
    return found


def forsake(connection: Connection, episode_id: str) -> int:
    """Mark everything in an open episode as part of a crashed attempt: none of its tokens is trained, and no request
    repeats its calls.

    Return the number of the attempt that follows; 0 if the episode is not open, and then nothing has changed.
    """
    own = select(EpisodeRow.state, EpisodeRow.attempt).where(EpisodeRow.id == episode_id).with_for_update()
    row = connection.execute(own).first()
    if row is None or row.state != "open":
        return 0
    attempt: int = row.attempt + 1
    sampled = (NodeRow.episode_id == episode_id, NodeRow.sampled, NodeRow.mask_reason.in_(["", REDACTED]))
    connection.execute(update(NodeRow).where(*sampled).values(mask_reason=CRASHED_ATTEMPT))
    of_episode = CallRow.episode_id == episode_id
    connection.execute(update(CallRow).where(of_episode).values(request_key="", open_to=None, reward=None))
    connection.execute(delete(RetryRow).where(RetryRow.episode_id == episode_id))
    values = {"reward": None, "components": None, "attempt": attempt}
    connection.execute(update(EpisodeRow).where(EpisodeRow.id == episode_id).values(values))
    return attempt


def insert_exchange(connection: Connection, call: CallRecord, exchange: dict[str, Any]) -> None:
    """Store a request to an upstream model and its response."""
    connection.execute(insert(CallRow), dict(call))
    connection.execute(insert(ExchangeRow), exchange)


def exchange(connection: Connection, episode_id: str, call_id: str) -> dict[str, Any] | None:
    """Return the request to an upstream model and its response, for a call of an episode."""
    query = (
        select(*ExchangeRow.__table__.c)
        .join(CallRow, CallRow.id == ExchangeRow.call_id)
        .where(CallRow.id == call_id, CallRow.episode_id == episode_id)
    )
    row = connection.execute(query).mappings().first()
    return dict(row) if row else None


def calls_with_reply(connection: Connection, episode_id: str, key: str) -> list[CallRecord]:
    """Return the calls of an episode whose request key begins with `key`, and whose clients were given a reply; the newest
    first."""
    query = (
        select(*CallRow.__table__.c)
        .where(CallRow.episode_id == episode_id, begins_with(CallRow.__table__.c.request_key, key))
        .where(CallRow.node >= 0, CallRow.finish_reason != "abandoned")
        .order_by(CallRow.received_at.desc())
    )
    return _call_records(connection, query)


def restarted(connection: Connection, episode_id: str, name: str) -> tuple[str, float] | None:
    """Return the call that a retry of a request began with `restart`, and the seconds since."""
    query = select(RetryRow.call_id, NOW - RetryRow.at).where(
        RetryRow.episode_id == episode_id, RetryRow.name == name
    )
    found = connection.execute(query).one_or_none()
    return None if found is None else (found[0], found[1])


def node_values(node: Node) -> dict[str, Any]:
    """Return a node as a row, without the ids of its model and episode."""
    return {
        "index": node.index,
        "parent": node.parent,
        "at": node.at,
        "sampled": node.sampled,
        "ids": node.ids.astype("<i4").tobytes(),
        "logprobs": node.logprobs.astype("<f4").tobytes(),
        "spans": spans_of(node),
        "flags": node.flags.astype("u1").tobytes(),
        "temperature": node.temperature,
        "mask_reason": node.mask_reason,
        "call_id": node.call_id,
        "images": [list(image) for image in node.images] or None,
        "kept": None if node.kept is None else node.kept.packed(),
    }


def spans_of(node: Node) -> list[list[int]]:
    """[[version, number of tokens], ...] of a node's tokens; a third number is the newest version it may be, if that differs."""
    if not len(node.versions):
        return []
    if node.newest is None and (node.versions == node.versions[0]).all():
        return [[int(node.versions[0]), len(node.versions)]]
    newest = node.versions if node.newest is None else node.newest
    changes = (np.diff(node.versions) != 0) | (np.diff(newest) != 0)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    spans = []
    for start, end in zip(starts, [*starts[1:], len(node.versions)], strict=True):
        version, last = int(node.versions[start]), int(newest[start])
        spans.append([version, end - start] if version == last else [version, end - start, last])
    return spans


def _versions(spans: list[list[int]]) -> tuple[Int32Array, Int32Array]:
    """Return the oldest and the newest version of every token."""
    counts = [span[1] for span in spans]
    oldest = np.repeat(np.asarray([span[0] for span in spans], np.int32), counts)
    newest = np.repeat(np.asarray([span[-1 if len(span) > 2 else 0] for span in spans], np.int32), counts)
    return oldest, newest


def _node(row: Any) -> Node:
    spans = row["spans"]
    versions, newest = _versions(spans)
    ids = np.frombuffer(row["ids"], "<i4")
    return Node(
        index=row["index"],
        parent=row["parent"],
        at=row["at"],
        sampled=row["sampled"],
        ids=ids,
        logprobs=np.frombuffer(row["logprobs"], "<f4"),
        versions=versions,
        flags=np.frombuffer(row["flags"], "u1"),
        temperature=row["temperature"],
        mask_reason=row["mask_reason"],
        call_id=row["call_id"],
        reward=row["reward"],
        finish_reason=row["finish_reason"] or "",
        newest=newest if any(len(span) > 2 for span in spans) else None,
        images=tuple(ImageSpan(*image) for image in row["images"] or ()),
        kept=None if row["kept"] is None else Kept.unpacked(row["kept"], len(ids)),
    )
