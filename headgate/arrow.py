"""The form in which token trees travel to a trainer: an Arrow table, one row per node.

The schema is the contract between gateway and trainer: columns are added and never removed or changed, unless `FEED_VERSION`
grows (docs/topics/feed.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.feed_version import FEED_VERSION, OLDEST_FEED
from headgate.kept import Kept
from headgate.routes import SHAPE_KEY, PackedRoutes
from headgate.types import (
    Episode,
    Group,
    ImageSpan,
    Node,
    TokenFlag,
)

_WITHOUT_IMAGES = 2
"""The version of tables without images, which older readers can read: the tokens of the others mean nothing without images."""
_READ = tuple(str(version) for version in range(OLDEST_FEED, FEED_VERSION + 1))

FEED_SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("group_version", pa.int32()),
        ("batch", pa.int32()),
        ("episode_id", pa.string()),
        ("reward", pa.float64()),
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("at", pa.int32()),
        ("sampled", pa.bool_()),
        ("ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("flags", pa.list_(pa.uint8())),
        ("temperature", pa.float32()),
        ("mask_reason", pa.string()),
        ("call_id", pa.string()),
        ("call_reward", pa.float64()),
        ("finish_reason", pa.string()),
        (
            "images",
            pa.list_(pa.struct([("hash", pa.string()), ("offset", pa.int32()), ("length", pa.int32())])),
        ),
        ("context_full", pa.bool_()),
        ("routed_experts", pa.binary()),
        ("components", pa.map_(pa.string(), pa.float64())),
        ("kept_tokens", pa.binary()),
    ],
    metadata={"headgate_feed": str(_WITHOUT_IMAGES)},
)
"""One row per node; the rows of an episode, and the episodes of a group, are consecutive.

An episode that made no call (older builds rewarded such episodes) has one row with node -1: it has nothing to train, but its
reward counts in its group. `reward` is the episode's, with those of its calls; `context_full` states whether its last call was
refused because the context was full. A sampled node has those of its call: `call_reward`, what was posted (null:
nothing), and `finish_reason`, why it ended (see `Node`). `images`: those among the row's own tokens, which are placeholders; the
file of each is the gateway's (`GET /admin/v1/images/HASH`). `routed_experts`: the experts that the row's tokens went through, in
the form of `headgate/routes.py`; null: not known. `components`: the named parts of the episode's reward. `kept_tokens`: what
truncated distributions kept, in the form of `headgate/kept.py`; null: it is known of no token. Their flags are TRUNCATED all the
same, for readers that do not know the column. Readers take columns by name: those new to a reader are left alone, and those in
`_LATER` may be missing.
"""
_LATER: dict[str, Any] = {
    "context_full": False,
    "finish_reason": "",
    "images": [],
    "routed_experts": None,
    "components": [],
    "kept_tokens": None,
}
"""Columns that feeds and exports of this schema version may lack, and what stands for them."""


_NO_NODE = Node(
    index=-1,
    parent=-1,
    at=0,
    sampled=False,
    ids=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
    flags=np.empty(0, np.uint8),
)


def schema(*, images: bool, routes: PackedRoutes | None = None) -> pa.Schema:
    """Return `FEED_SCHEMA`, of the version of tables with images or without. `routes`: some of the table's, for their shape."""
    metadata = {"headgate_feed": str(FEED_VERSION if images else _WITHOUT_IMAGES)}
    if routes is not None:
        metadata[SHAPE_KEY] = json.dumps(
            {"layers": routes.layers, "top_k": routes.top_k, "dtype": routes.dtype}
        )
    return FEED_SCHEMA.with_metadata(metadata)


def groups_to_arrow(groups: Sequence[Group]) -> pa.Table:
    """Return the groups as a table of `schema`."""
    rows = [
        {
            "group_id": group.group_id,
            "task_id": group.task_id,
            "group_version": group.version,
            "batch": group.batch,
            "episode_id": episode.episode_id,
            "reward": episode.reward,
            "context_full": episode.context_full,
            "components": [*episode.components.items()],
            "node": node.index,
            "parent": node.parent,
            "at": node.at,
            "sampled": node.sampled,
            "ids": node.ids,
            "logprobs": node.logprobs,
            "versions": node.versions,
            "flags": node.without_kept().flags,
            "temperature": node.temperature,
            "mask_reason": node.mask_reason,
            "call_id": node.call_id,
            "call_reward": node.reward,
            "finish_reason": node.finish_reason,
            "images": [image._asdict() for image in node.images],
            "routed_experts": None if node.routes is None else node.routes.data,
            "kept_tokens": None if node.kept is None else node.kept.packed(),
        }
        for group in groups
        for episode in group.episodes
        for node in episode.nodes or (_NO_NODE,)
    ]
    nodes = (node for group in groups for episode in group.episodes for node in episode.nodes)
    routes = next((node.routes for node in nodes if node.routes is not None), None)
    return pa.Table.from_pylist(rows, schema=schema(images=any(row["images"] for row in rows), routes=routes))


def groups_from_arrow(table: pa.Table) -> tuple[Group, ...]:
    """Return the inverse of `groups_to_arrow`. Raise ValueError on another schema version."""
    version = (table.schema.metadata or {}).get(b"headgate_feed", b"").decode()
    if version not in _READ:
        raise ValueError(f"feed schema {version or 'unknown'}: this build reads {' and '.join(_READ)}")
    shape = json.loads((table.schema.metadata or {}).get(SHAPE_KEY.encode(), b"{}"))
    groups: dict[tuple[str, int], tuple[dict[str, Any], dict[str, tuple[dict[str, Any], list[Node]]]]] = {}
    for row in _rows(table):  # a later batch may have a group of the same name
        _, episodes = groups.setdefault((row["group_id"], row["batch"]), (row, {}))
        _, nodes = episodes.setdefault(row["episode_id"], (row, []))
        if row["node"] >= 0:
            nodes.append(_node(row, shape))
    return tuple(
        Group(
            group_id,
            head["task_id"],
            head["group_version"],
            tuple(
                Episode(eid, first["reward"], tuple(nodes), first["context_full"], dict(first["components"]))
                for eid, (first, nodes) in episodes.items()
            ),
            head["batch"],
        )
        for (group_id, _), (head, episodes) in groups.items()
    )


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    arrays = {"ids", "logprobs", "versions", "flags"}
    table = table.combine_chunks()
    for name, missing in _LATER.items():
        if name not in table.column_names:
            table = table.append_column(
                name, pa.array([missing] * table.num_rows, FEED_SCHEMA.field(name).type)
            )
    columns = {name: table[name] if name in arrays else table[name].to_pylist() for name in FEED_SCHEMA.names}
    for i in range(table.num_rows):
        yield {
            name: column[i].values.to_numpy(zero_copy_only=False) if name in arrays else column[i]
            for name, column in columns.items()
        }


def _node(row: dict[str, Any], shape: dict[str, Any]) -> Node:
    packed, flags, kept = row["routed_experts"], row["flags"], None
    if row["kept_tokens"] is not None:
        kept = Kept.unpacked(row["kept_tokens"], len(row["ids"]))
        flags = np.where(kept.known, flags & ~np.uint8(TokenFlag.TRUNCATED), flags)
    return Node(
        index=row["node"],
        parent=row["parent"],
        at=row["at"],
        sampled=row["sampled"],
        ids=row["ids"],
        logprobs=row["logprobs"],
        versions=row["versions"],
        flags=flags,
        temperature=row["temperature"],
        mask_reason=row["mask_reason"],
        call_id=row["call_id"],
        reward=row["call_reward"],
        finish_reason=row["finish_reason"],
        images=tuple(ImageSpan(**image) for image in row["images"]),
        routes=None if packed is None else PackedRoutes(packed, **shape),
        kept=kept,
    )


def write_stream(groups: Sequence[Group]) -> bytes:
    table = groups_to_arrow(groups)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def read_stream(content: bytes) -> tuple[Group, ...]:
    """Return the inverse of `write_stream`. Raise ValueError on another schema version."""
    with pa.ipc.open_stream(content) as reader:
        return groups_from_arrow(reader.read_all())
