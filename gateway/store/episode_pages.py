"""Statements by which people look through many episodes: pages of a filtered list, its length, its histogram over time.

A place in the list is `created_at` and id of an episode, newest first. Where a list is pinned to a place, episodes that are
opened later are not in it, so that its length and its positions stay while a user scrolls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, Connection, Integer, Select, case, func, or_, select, tuple_

from gateway.store import decisions, tallies
from gateway.store.clock import NOW
from gateway.store.columns import contains
from gateway.store.episodes import COLUMNS, UNFINISHED, by_id
from gateway.store.models import CallRow, EpisodeRow, VersionRow
from gateway.store.records import EpisodeRecord
from headgate.types import EpisodeMode

Place = tuple[float, str]
"""`created_at` and id."""
_C = EpisodeRow.__table__.c
_NEWEST_FIRST = (_C.created_at.desc(), _C.id.desc())
Sort = Literal["newest", "best", "worst", "longest"]
_SORTS: dict[Sort, tuple[ColumnElement[Any], ...]] = {
    "best": (_C.reward.is_(None), _C.reward.desc()),
    "worst": (_C.reward.is_(None), _C.reward),
    "longest": (_C.closed_at.is_(None), (_C.closed_at - _C.created_at).desc()),
}
"""Episodes without a reward, or that still run, come last."""
_SEARCHED = ("id", "task_id", "group_id", "agent", "reason", "error")


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """A filter of episodes; a field that is None matches all. Numbers are inclusive bounds, except `until`."""

    state: str | None = None
    mode: EpisodeMode | None = None
    group_id: str | None = None
    task_id: str | None = None
    agent: str | None = None
    model: str | None = None
    reason: str | None = None
    version_min: int | None = None
    version_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    since: float | None = None
    """Opened then or later, in seconds since the epoch."""
    until: float | None = None
    """Opened before."""
    text: str | None = None
    """A part of the id, of a name, or of a text."""
    models: tuple[str, ...] | None = None
    """Episodes of these models alone: those within reach of the key."""
    pin: Place | None = None
    """The newest episode of the list."""
    batch: int | None = None
    """Episodes of the groups that were trained in this batch."""

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter in SQL, without `models`."""
        equal = ("state", "mode", "group_id", "task_id", "agent", "model", "reason")
        given = [(name, getattr(self, name)) for name in equal]
        found: list[ColumnElement[bool]] = [_C[name] == value for name, value in given if value is not None]
        for low, high, column in (
            (self.version_min, self.version_max, _C.version),
            (self.reward_min, self.reward_max, _C.reward),
        ):
            found += [column >= low] if low is not None else []
            found += [column <= high] if high is not None else []
        if self.since is not None:
            found.append(_C.created_at >= self.since)
        if self.until is not None:
            found.append(_C.created_at < self.until)
        if self.text:
            found.append(or_(*(contains(_C[name], self.text) for name in _SEARCHED)))
        if self.batch is not None:
            found.append(tuple_(_C.model, _C.group_id).in_(decisions.groups_of_batch(self.batch)))
        if self.pin is not None:
            found.append(tuple_(_C.created_at, _C.id) <= tuple_(*self.pin))
        return found

    @property
    def tallied(self) -> bool:
        """True if the tallies know how many episodes match."""
        known = {"model", "models", *tallies.KEY}
        return all(getattr(self, f.name) is None for f in fields(self) if f.name not in known)


ALL = EpisodeFilter()


@dataclass(frozen=True, slots=True)
class Bins:
    """A histogram over the time of opening; every list has one entry a bin."""

    first: float
    last: float
    counts: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    rewarded: list[int] = field(default_factory=list)
    reward_mean: list[float | None] = field(default_factory=list)


def list_episodes(
    connection: Connection,
    wanted: EpisodeFilter = ALL,
    limit: int = 100,
    after: Place | None = None,
    offset: int = 0,
    sort: Sort = "newest",
) -> list[EpisodeRecord]:
    """Return the newest episodes. `after`: the position of the last known one, with the sort `newest` only; `offset`: how
    many to skip."""
    if sort != "newest":
        order = (*_SORTS[sort], *_NEWEST_FIRST)
        query = select(*COLUMNS).where(*_within(wanted)).order_by(*order).limit(limit).offset(offset)
        return [cast(EpisodeRecord, dict(row._mapping)) for row in connection.execute(query)]
    conditions = wanted.conditions()
    if after is not None:
        conditions.append(tuple_(_C.created_at, _C.id) < tuple_(*after))
    if offset:
        # The places alone are read from an index, also those that are passed over.
        ids = [
            place.id
            for place in _newest(connection, wanted, (_C.created_at, _C.id), conditions, limit, offset)
        ]
        rows = {row["id"]: row for row in by_id(connection, ids)}
        return [rows[episode_id] for episode_id in ids]
    found = _newest(connection, wanted, COLUMNS, conditions, limit, 0)
    return [cast(EpisodeRecord, dict(row._mapping)) for row in found]


def _newest(
    connection: Connection,
    wanted: EpisodeFilter,
    columns: Sequence[ColumnElement[Any]],
    conditions: Sequence[ColumnElement[bool]],
    limit: int,
    offset: int,
) -> Sequence[Any]:
    query = select(*columns).where(*conditions).order_by(*_NEWEST_FIRST)
    models = None if wanted.models is None else _chosen(wanted)
    if models is None:
        return connection.execute(query.limit(limit).offset(offset)).all()
    # One page for each model: the index delivers it directly, however many rows there are.
    pages = [connection.execute(query.where(_C.model == m).limit(limit + offset)) for m in models]
    rows = sorted((row for page in pages for row in page), key=lambda row: (row.created_at, row.id))
    return rows[::-1][offset : offset + limit]


def _chosen(wanted: EpisodeFilter) -> Sequence[str] | None:
    """Return the models whose episodes can match; None: all."""
    if wanted.model is None:
        return wanted.models
    return (wanted.model,) if wanted.models is None or wanted.model in wanted.models else ()


def _within(wanted: EpisodeFilter) -> list[ColumnElement[bool]]:
    """All conditions of a filter."""
    own = [] if wanted.models is None else [_C.model.in_(wanted.models)]
    return [*wanted.conditions(), *own]


def count(connection: Connection, wanted: EpisodeFilter = ALL) -> int:
    """Return the number of episodes that match."""
    if not wanted.tallied:
        return connection.scalar(select(func.count()).select_from(EpisodeRow).where(*_within(wanted))) or 0
    filters = (wanted.mode, wanted.state, wanted.reason)
    return sum(
        n
        for key, n in tallies.tallies(connection, _chosen(wanted)).items()
        if all(value is None or value == part for value, part in zip(filters, key, strict=True))
    )


def newest_place(connection: Connection, wanted: EpisodeFilter = ALL) -> Place | None:
    """Return the place of the newest episode that matches; None: there is none."""
    found = list_episodes(connection, wanted, 1)
    return (found[0]["created_at"], found[0]["id"]) if found else None


def calls_of(connection: Connection, episode_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the number of calls of some episodes, of the tokens that they sampled, and of those that were cut at their limit."""
    cut = func.sum(case((CallRow.finish_reason == "length", 1), else_=0))
    query = (
        select(CallRow.episode_id, func.count(), func.sum(CallRow.completion_tokens), cut)
        .where(CallRow.episode_id.in_(episode_ids))
        .group_by(CallRow.episode_id)
    )
    names = ("calls", "sampled_tokens", "truncated")
    found = {row[0]: dict(zip(names, map(int, row[1:]), strict=True)) for row in connection.execute(query)}
    return {name: found.get(name, dict.fromkeys(names, 0)) for name in episode_ids}


def group_rewards(connection: Connection, group_ids: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rewards of groups by model and id: how many, mean and population standard deviation."""
    rewards = (func.count().label("rewards"), func.avg(_C.reward), func.avg(_C.reward * _C.reward))
    query = (
        select(_C.model, _C.group_id, *rewards)
        .where(_C.group_id.in_(group_ids), _C.mode == "train", _C.reward.is_not(None))
        .group_by(_C.model, _C.group_id)
    )
    return {
        (model, group): {"rewards": count, "mean": mean, "std": _deviation(mean, square)}
        for model, group, count, mean, square in connection.execute(query)
    }


def slowest_groups(connection: Connection, model: str, limit: int = 20) -> list[dict[str, Any]]:
    """Return the groups whose oldest episode has run for longest, with their unfinished episodes."""
    query = select(_C.group_id, _C.id, _C.created_at).where(UNFINISHED, _C.model == model, _C.mode == "train")
    found: dict[str, dict[str, Any]] = {}
    now = connection.scalar(select(NOW)) or 0.0
    for row in connection.execute(query.order_by(_C.created_at, _C.id)):
        age = max(0.0, now - row.created_at)
        group = found.setdefault(row.group_id, {"group_id": row.group_id, "oldest_s": age, "episodes": []})
        group["episodes"].append(row.id)
    return [{**group, "running": len(group["episodes"])} for group in list(found.values())[:limit]]


def histogram(connection: Connection, wanted: EpisodeFilter, bins: int) -> Bins | None:
    """How many episodes that match were opened when; None: there are none. From `since` to `until`, where they are given."""
    conditions = _within(wanted)
    ends = select(func.min(_C.created_at), func.max(_C.created_at)).where(*conditions)
    first, last = connection.execute(ends).one()
    if first is None:
        return None
    first, last = wanted.since or first, wanted.until or last
    width = max(last - first, 1e-3) / bins
    found = Bins(first, first + width * bins, [0] * bins, [0] * bins, [0] * bins, [None] * bins)
    for row in connection.execute(_binned(connection, first, width).where(*conditions)):
        place = min(row.bin, bins - 1)  # the last episode is at the end of the last bin
        found.counts[place] += row.count
        found.closed[place] += row.closed
        total = (found.reward_mean[place] or 0.0) * found.rewarded[place] + (row.total or 0.0)
        found.rewarded[place] += row.rewarded
        if found.rewarded[place]:
            found.reward_mean[place] = total / found.rewarded[place]
    return found


def _binned(connection: Connection, first: float, width: float) -> Select[Any]:
    place = (_C.created_at - first) / width
    # PostgreSQL rounds where it casts, and not every SQLite has floor().
    whole = (func.floor(place) if connection.dialect.name == "postgresql" else place).cast(Integer)
    columns: list[ColumnElement[Any]] = [
        whole.label("bin"),
        func.count().label("count"),
        func.sum(case((_C.state == "closed", 1), else_=0)).label("closed"),
        func.count(_C.reward).label("rewarded"),
        func.sum(_C.reward).label("total"),
    ]
    return select(*columns).group_by(whole)


def evaluations(connection: Connection, model: str) -> list[dict[str, Any]]:
    """Return the rewards of a model's evaluation episodes by the version that they began with: how many, mean, population
    standard deviation, and when the last of them began.

    Conversations with a notice do not count: those of live agents that are only not trained, and those without their beginning.
    """
    mean, square = func.avg(_C.reward), func.avg(_C.reward * _C.reward)
    query = (
        select(_C.version, func.count().label("episodes"), mean, square, func.max(_C.created_at).label("at"))
        .where(_C.mode == "eval", _C.model == model, _C.reward.is_not(None), _C.notice == "")
        .group_by(_C.version)
        .order_by(_C.version)
    )
    return [
        {
            "version": version,
            "episodes": episodes,
            "reward_mean": reward,
            "reward_std": _deviation(reward, squared),
            "at": at,
        }
        for version, episodes, reward, squared, at in connection.execute(query)
    ]


def _deviation(mean: float, square: float) -> float:
    return max(square - mean**2, 0.0) ** 0.5


def reasons(connection: Connection, model: str) -> dict[str, int]:
    """Return the number of a model's closed training episodes by reason."""
    counts = tallies.tallies(connection, (model,))
    return {reason: n for (mode, state, reason), n in counts.items() if (mode, state) == ("train", "closed")}


def facets(connection: Connection, wanted: EpisodeFilter = ALL) -> dict[str, Any]:
    """Return the values of filters: how many episodes have each mode, state and reason; agents; newest version."""
    models = _chosen(wanted)
    found: dict[str, Any] = {"modes": {}, "states": {}, "reasons": {}}
    for key, n in tallies.tallies(connection, models).items():
        for name, value in zip(found, key, strict=True):
            if value:
                found[name][value] = found[name].get(value, 0) + n
    of = replace(ALL, model=wanted.model, models=wanted.models)
    agents = select(_C.agent).where(*_within(of), _C.agent != "").distinct().order_by(_C.agent)
    newest = select(func.max(VersionRow.version))
    if models is not None:
        newest = newest.where(VersionRow.model.in_(models))
    return {
        **found,
        "agents": list(connection.scalars(agents)),
        "newest_version": connection.scalar(newest) or 0,
    }
