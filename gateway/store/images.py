"""Statements about the files of images: stored once by hash, and deleted with the last episode that has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, select

from gateway.store.columns import portions
from gateway.store.models import EpisodeRow, ImageRow, ImageUseRow
from gateway.store.upsert import insert


def keep(connection: Connection, episode_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Stores images that an episode has, those that are there already only as its own."""
    if rows:
        files = insert(connection, ImageRow.__table__).values([dict(row) for row in rows])
        connection.execute(files.on_conflict_do_nothing())
        uses = [{"episode_id": episode_id, "hash": row["hash"]} for row in rows]
        connection.execute(insert(connection, ImageUseRow.__table__).values(uses).on_conflict_do_nothing())


def keep_known(connection: Connection, episode_id: str, names: Collection[str]) -> set[str]:
    """Has an episode keep images that are stored; returns those that are not."""
    known = set(connection.scalars(select(ImageRow.hash).where(ImageRow.hash.in_(names))))
    if known:
        uses = [{"episode_id": episode_id, "hash": name} for name in sorted(known)]
        connection.execute(insert(connection, ImageUseRow.__table__).values(uses).on_conflict_do_nothing())
    return set(names) - known


def read(connection: Connection, name: str) -> tuple[str, bytes] | None:
    """An image's media type and file, by its hash."""
    row = connection.execute(select(ImageRow.media_type, ImageRow.data).where(ImageRow.hash == name)).first()
    return None if row is None else (row.media_type, row.data)


def used_in(connection: Connection, name: str, models: Collection[str] | None) -> bool:
    """True if an episode of some models has an image; None: of any."""
    query = select(ImageUseRow.hash).where(ImageUseRow.hash == name)
    if models is not None:
        query = query.join(EpisodeRow, EpisodeRow.id == ImageUseRow.episode_id).where(
            EpisodeRow.model.in_(models)
        )
    return connection.execute(query.limit(1)).first() is not None


def any_used(connection: Connection) -> bool:
    """True if any episode has an image."""
    return connection.execute(select(ImageUseRow.hash).limit(1)).first() is not None


def used_by(connection: Connection, episode_ids: Sequence[str]) -> set[str]:
    """The hashes of the images that some episodes have."""
    found: set[str] = set()
    for some in portions(episode_ids):
        found |= set(connection.scalars(select(ImageUseRow.hash).where(ImageUseRow.episode_id.in_(some))))
    return found


def delete_unused(connection: Connection, names: Collection[str]) -> None:
    """Deletes those of some images that no episode has any more."""
    used = exists().where(ImageUseRow.hash == ImageRow.hash)
    for some in portions(sorted(names)):
        connection.execute(delete(ImageRow).where(ImageRow.hash.in_(some), ~used))
