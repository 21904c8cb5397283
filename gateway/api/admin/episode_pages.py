"""`/admin/v1/episodes` as a list: filters, pages, positions, how many there are, and when they were opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from sqlalchemy import Connection

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.store import episode_pages
from gateway.store.episode_pages import EpisodeFilter, Place, Sort
from gateway.store.previews import previews
from gateway.store.records import EpisodeRecord
from headgate.errors import BadRequest
from headgate.types import EpisodeMode

router = admin_router("Episodes", "/episodes")

_PLACE = r"^\d{1,12}(\.\d{1,12})?_[A-Za-z0-9-]{1,40}$"
Pin = Annotated[
    str | None,
    Query(description="The `pin` of an earlier page: leaves out what was opened since.", pattern=_PLACE),
]
EpisodeState = Literal["open", "grading", "closed"]
Word = Annotated[str | None, Query(max_length=255)]
Version = Annotated[int | None, Query(ge=0, lt=2**31)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]
Moment = Annotated[
    float | None, Query(ge=0, lt=1e12, description="A time of opening, in seconds since 1970.")
]


async def episode_filter(
    access: Admin,
    state: EpisodeState | None = None,
    mode: EpisodeMode | None = None,
    group_id: str | None = None,
    task_id: str | None = None,
    agent: str | None = None,
    model: Word = None,
    reason: Word = None,
    version_min: Version = None,
    version_max: Version = None,
    reward_min: Reward = None,
    reward_max: Reward = None,
    since: Moment = None,
    until: Moment = None,
    text: Annotated[
        str | None,
        Query(max_length=255, description="A part of the id, task, group, agent, reason or error."),
    ] = None,
    batch: Annotated[
        int | None, Query(ge=0, lt=2**31, description="Of groups that were trained in this batch.")
    ] = None,
    pin: Pin = None,
) -> EpisodeFilter:
    """Return the filter of a request for episodes: those within reach that match all of its parameters."""
    if model is not None:
        await access.recorded(model)
    models = None if access.reach.everything else access.reach.models
    return EpisodeFilter(
        state, mode, group_id, task_id, agent, model, reason, version_min, version_max, reward_min, reward_max,
        since, until, text, models, _place(pin), batch,
    )  # fmt: skip


Wanted = Annotated[EpisodeFilter, Depends(episode_filter)]


@router.get("")
async def list_episodes(
    access: Admin,
    wanted: Wanted,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[
        str | None, Query(description="The `next` of the previous page.", pattern=_PLACE)
    ] = None,
    offset: Annotated[int, Query(ge=0, lt=2**31, description="Skip this many; excludes `after`.")] = 0,
    total: Annotated[
        bool, Query(description="Return the length of the list, and a `pin` that keeps it.")
    ] = False,
    sort: Annotated[
        Sort, Query(description="By reward (`best`, `worst`) or duration (`longest`); not with `after`.")
    ] = "newest",
    calls: Annotated[bool, Query(description="Return each episode's calls and sampled tokens.")] = False,
    preview: Annotated[
        bool, Query(description="Return the rewards of each group, and the text of the question and reply.")
    ] = False,
) -> dict[str, Any]:
    """Return the newest episodes. `next` requests the following page; null on the last one, and with another `sort`.

    With `preview`, `group` has the number, mean and population standard deviation of the group's rewards, `prompt_end` the last
    tokens of the first prompt, and `reply_start` the first tokens of the last reply.

    `id` is `episode_id` under its old name.
    """
    if after is not None and (offset or sort != "newest"):
        param = "offset" if offset else "sort"
        raise BadRequest(f"after and {param}: name one of the two", code="invalid_value", param=param)

    def page(connection: Connection) -> dict[str, Any]:
        rows = episode_pages.list_episodes(connection, wanted, limit, _place(after), offset, sort)
        own = episode_pages.calls_of(connection, [row["id"] for row in rows]) if calls else {}
        seen = _previews(connection, access, rows) if preview else {}
        shown = [
            {"episode_id": row["id"], **row, **own.get(row["id"], {}), **seen.get(row["id"], {})}
            for row in rows
        ]
        full = len(rows) == limit and sort == "newest"
        more = _written((rows[-1]["created_at"], rows[-1]["id"])) if full else None
        return {"episodes": shown, "next": more, **(_length(connection, wanted) if total else {})}

    return await access.gateway.database.read(page)


def _previews(
    connection: Connection, access: Access, rows: Sequence[EpisodeRecord]
) -> dict[str, dict[str, Any]]:
    groups = episode_pages.group_rewards(connection, list({row["group_id"] for row in rows}))
    found: dict[str, dict[str, Any]] = {
        row["id"]: {"group": groups.get((row["model"], row["group_id"]))} for row in rows
    }
    for model in {row["model"] for row in rows}:
        served = access.gateway.models.local.get(model)
        if served is None:
            continue
        ids = [row["id"] for row in rows if row["model"] == model]
        for one, (prompt_end, reply_start) in previews(connection, model, ids).items():
            found[one]["prompt_end"] = served.renderer.decode(prompt_end)
            found[one]["reply_start"] = served.renderer.decode(reply_start)
    return found


@router.get("/histogram")
async def histogram(
    access: Admin, wanted: Wanted, bins: Annotated[int, Query(ge=1, le=500)] = 60
) -> dict[str, Any]:
    """Return the number of episodes by the time of their opening, how many of them are closed and rewarded, and their mean
    reward."""
    found = await access.gateway.database.read(lambda c: episode_pages.histogram(c, wanted, bins))
    if found is None:
        return {"from": wanted.since, "to": wanted.until, "bin_s": None, "counts": [], "closed": [],
                "rewarded": [], "reward_mean": []}  # fmt: skip
    return {
        "from": found.first,
        "to": found.last,
        "bin_s": (found.last - found.first) / bins,
        "counts": found.counts,
        "closed": found.closed,
        "rewarded": found.rewarded,
        "reward_mean": found.reward_mean,
    }


@router.get("/facets")
async def facets(access: Admin, model: Word = None) -> dict[str, Any]:
    """Return the values that filters can choose from, with their numbers of episodes."""
    if model is not None:
        await access.recorded(model)
    models = None if access.reach.everything else access.reach.models
    wanted = EpisodeFilter(model=model, models=models)
    return await access.gateway.database.read(lambda c: episode_pages.facets(c, wanted))


def _length(connection: Connection, wanted: EpisodeFilter) -> dict[str, Any]:
    pin = wanted.pin or episode_pages.newest_place(connection, wanted)
    return {"total": episode_pages.count(connection, wanted), "pin": None if pin is None else _written(pin)}


def _written(place: Place) -> str:
    return f"{place[0]!r}_{place[1]}"


def _place(written: str | None) -> Place | None:
    if written is None:
        return None
    at, _, episode_id = written.partition("_")
    return float(at), episode_id
