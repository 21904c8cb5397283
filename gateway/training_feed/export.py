"""Exports the store's groups as a Parquet file of `headgate.arrow.FEED_SCHEMA`.

Reads the database directly and changes nothing in it, whether or not a gateway runs. The file is written under another name and
renamed, so it is complete or absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import OperationalError

from gateway.config.settings import Settings
from gateway.store import decisions, episodes, images, routes
from gateway.store import ledger as statements
from gateway.store.connections import driver, without_password
from gateway.store.schema import check_form
from gateway.training_feed.decision_log import Entry
from gateway.training_feed.groups import GroupReader, as_of
from headgate.arrow import groups_to_arrow, schema
from scheduler.policies.lineage import orphans

ROW_GROUP = 32
"""Groups in one row group of the file, which are in memory together."""


class ExportError(Exception):
    """The export failed: no group matches, or the store cannot be read. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups to export: those of batches `first` up to but without `until`, or all rewarded ones."""

    model: str
    first: int = 0
    until: int | None = None
    everything: bool = False


def export(
    settings: Settings,
    chosen: Selection,
    out: Path,
    advance: Callable[[int, int], Any] = lambda _done, _all: None,
) -> int:
    """Write `out`; return the number of groups. `advance` gets the numbers of written and of all groups.

    Raise ExportError, and ConfigError for a database that this build cannot read.

    Trained groups come first, in the order in which they were trained and as their leases gave them (ORPHANED is current); then,
    with `everything`, all other rewarded training episodes, by group in the order in which they were opened, with `batch` -1.
    Groups with a deleted episode are left out.
    """
    check_form(settings.store)
    engine = create_engine(driver(settings.store.url))
    partial = out.with_name(f"{out.name}.part")
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA query_only = ON")
            reader = GroupReader(
                chosen.model, settings.staleness_of(chosen.model), _orphans(connection, settings, chosen)
            )
            entries = reader.complete(connection, list(_entries(connection, chosen)))
            out.parent.mkdir(parents=True, exist_ok=True)
            columns = schema(
                images=images.any_used(connection), routes=routes.shape(connection, chosen.model)
            )
            with pq.ParquetWriter(partial, columns, compression="zstd") as writer:
                for start in range(0, len(entries), ROW_GROUP):
                    some = entries[start : start + ROW_GROUP]
                    writer.write_table(groups_to_arrow(reader.read(connection, some)))
                    advance(start + len(some), len(entries))
        os.replace(partial, out)
    except OperationalError as error:
        raise ExportError(f"{without_password(settings.store.url)}: {error.orig}") from error
    finally:
        partial.unlink(missing_ok=True)
        engine.dispose()
    return len(entries)


def _orphans(connection: Connection, settings: Settings, chosen: Selection) -> Callable[[], frozenset[int]]:
    newest = statements.newest_version(connection, chosen.model, "live")
    if newest is None or settings.update.orphans != "drop":
        return frozenset
    lost = orphans(statements.parents(connection, chosen.model), newest["version"])
    return lambda: lost


def _entries(connection: Connection, chosen: Selection) -> Iterator[Entry]:
    trained: set[str] = set()
    for row in decisions.trained(connection, chosen.model, chosen.first, chosen.until):
        entry = as_of(row)
        trained.update(entry.rewarded)
        yield entry
    if chosen.everything:
        others: dict[str, Entry] = {}
        for episode_id, group_id, version in episodes.rewarded(connection, chosen.model):
            if episode_id not in trained:
                others.setdefault(group_id, Entry(group_id, version)).rewarded.append(episode_id)
        yield from others.values()
