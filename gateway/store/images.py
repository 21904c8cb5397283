"""Statements about the files of images: stored once by hash, and deleted with the last episode that has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, func, select

from gateway.store.columns import portions
from gateway.store.models import EpisodeRow, ImageRow, ImageUseRow
from gateway.store.upsert import insert


def keep(
    connection: Connection,
    episode_id: str,
    names: Collection[str],
    files: Sequence[Mapping[str, Any]],
    most: int,
) -> tuple[set[str], int]:
    """Have an episode keep images, those of `files` among them that are not stored yet.

    Returns the images that are nowhere, and the bytes of all that the episode would have. Nothing is kept if there are such
    images, or more than `most` bytes.
    """
    own = set(connection.scalars(select(ImageUseRow.hash).where(ImageUseRow.episode_id == episode_id)))
    added = set(names) - own
    if not added:
        return set(), 0
    stored = _sizes(connection, own | added)
    sizes = {row["hash"]: len(row["data"]) for row in files} | stored
    missing, total = added - sizes.keys(), sum(sizes.get(name, 0) for name in own | added)
    if missing or total > most:
        return missing, total
    if rows := [dict(row) for row in files if row["hash"] in added - stored.keys()]:
        connection.execute(insert(connection, ImageRow.__table__).values(rows).on_conflict_do_nothing())
    uses = [{"episode_id": episode_id, "hash": name} for name in sorted(added)]
    connection.execute(insert(connection, ImageUseRow.__table__).values(uses).on_conflict_do_nothing())
    return missing, total


def _sizes(connection: Connection, names: Collection[str]) -> dict[str, int]:
    """Return the bytes of those images that are stored, which no process deletes before this transaction ends."""
    query = select(ImageRow.hash, func.length(ImageRow.data)).where(ImageRow.hash.in_(names))
    locked = query.order_by(ImageRow.hash).with_for_update(read=True, key_share=True)
    return dict(connection.execute(locked).tuples().all())


def read(connection: Connection, name: str) -> tuple[str, bytes] | None:
    """Return an image's media type and file, by its hash."""
    row = connection.execute(select(ImageRow.media_type, ImageRow.data).where(ImageRow.hash == name)).first()
    return None if row is None else (row.media_type, row.data)


def used_in(connection: Connection, name: str, models: Collection[str] | None) -> bool:
    """Return true if an episode of some models has an image; None: of any."""
    query = select(ImageUseRow.hash).where(ImageUseRow.hash == name)
    if models is not None:
        query = query.join(EpisodeRow, EpisodeRow.id == ImageUseRow.episode_id).where(
            EpisodeRow.model.in_(models)
        )
    return connection.execute(query.limit(1)).first() is not None


def any_used(connection: Connection) -> bool:
    """Return true if any episode has an image."""
    return connection.execute(select(ImageUseRow.hash).limit(1)).first() is not None


def used_by(connection: Connection, episode_ids: Sequence[str]) -> set[str]:
    """Return the hashes of the images that some episodes have."""
    found: set[str] = set()
    for some in portions(episode_ids):
        found |= set(connection.scalars(select(ImageUseRow.hash).where(ImageUseRow.episode_id.in_(some))))
    return found


def delete_unused(connection: Connection, names: Collection[str]) -> None:
    """Delete those of some images that no episode uses. An image that an episode starts to use in the meantime stays."""
    used = exists().where(ImageUseRow.hash == ImageRow.hash)
    for some in portions(sorted(names)):
        locked = (
            select(ImageRow.hash).where(ImageRow.hash.in_(some)).order_by(ImageRow.hash).with_for_update()
        )
        connection.execute(
            locked
        )  # so that the next statement sees the uses of the transactions that held them
        connection.execute(delete(ImageRow).where(ImageRow.hash.in_(some), ~used))
