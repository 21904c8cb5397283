"""Compare the recorded experts of tokens with what a fake engine's weights send them through.

Imports nothing of headgate: it knows how the fake engine draws experts, and that a sampled token names its version. The row of a
token is that of the version that sampled the next one; a prompt's tokens have the row of any version.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.faults.checker import Report
from tests.faults.evidence import Evidence, Row, ids_of

WRONG = "wrong_route"
"""The count: a token whose recorded experts are not those of the version that sampled the next token."""
Experts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Input:
    """A token that an engine computed, and the token that was predicted from it."""

    position: int
    token: int
    next_token: int
    sampled: bool
    """True if the next token was sampled."""
    experts: Experts | None
    """As recorded; None: none are."""


def check_routes(evidence: Evidence, report: Report) -> None:
    """Count `WRONG`, and the facts `routed` and `unrouted`: sampled tokens predicted with recorded experts, and without."""
    weights: list[str] = evidence.plan["weights_ids"]
    block: int = evidence.plan["block"]

    @cache
    def experts(version: int, position: int, token: int) -> Experts:
        return _experts(weights[version], position, token, evidence.plan["routers"])

    for episode, each in _inputs(evidence):
        if each.experts is None:
            report.facts["unrouted"] += each.sampled
            continue
        report.facts["routed"] += each.sampled
        versions = [each.next_token // block] if each.sampled else range(len(weights))
        if not any(experts(version, each.position, each.token) == each.experts for version in versions):
            report.wrong(WRONG, f"{episode}: the token at {each.position} is recorded with {each.experts}")


def _experts(weights_id: str, position: int, token: int, routers: dict[str, Any]) -> Experts:
    key = f"{weights_id}:{position}:{token}".encode()
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return tuple(
        tuple((draw + 7 * layer + k) % routers["experts"] for k in range(routers["top_k"]))
        for layer in routers["layers"]
    )


def _inputs(evidence: Evidence) -> Iterator[tuple[str, _Input]]:
    """Yield all inputs of all trees, each with its episode."""
    trees: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for row in evidence.tables["nodes"]:
        trees[row["episode_id"], row["model"]][row["index"]] = row
    stored: dict[tuple[str, str], dict[int, list[Experts | None]]] = defaultdict(dict)
    for row in evidence.tables["node_routes"]:
        stored[row["episode_id"], row["model"]][row["index"]] = _rows(row)
    for place, tree in trees.items():
        for row in tree.values():
            yield from ((place[0], each) for each in _of_node(tree, row, stored[place].get(row["index"])))


def _of_node(tree: dict[int, Row], row: Row, rows: list[Experts | None] | None) -> Iterator[_Input]:
    """Yield the inputs that predict a node's tokens: the token before it, and all of its own but the last."""
    ids, start, parent = ids_of(row), _start(tree, row), row["parent"]
    before = [ids_of(tree[parent])[row["at"] - 1]] if parent >= 0 else []
    inputs = [*before, *ids]
    rows = rows or [None] * len(inputs)
    if len(rows) != len(inputs):
        raise ValueError(f"{len(rows)} rows of experts are stored for {len(inputs)} tokens")
    for i, (token, following) in enumerate(itertools.pairwise(inputs)):
        yield _Input(start - len(before) + i, token, following, bool(row["sampled"]), rows[i])


def _start(tree: dict[int, Row], row: Row) -> int:
    """Return the number of tokens before a node."""
    return 0 if row["parent"] < 0 else _start(tree, tree[row["parent"]]) + row["at"]


def _rows(row: Row) -> list[Experts | None]:
    packed = np.frombuffer(row["data"], {"uint8": "u1", "uint16": "<u2"}[row["dtype"]])
    absent = np.iinfo(packed.dtype).max
    rows = packed.reshape(-1, row["layers"], row["top_k"])
    return [None if (each == absent).all() else tuple(map(tuple, each.tolist())) for each in rows]
