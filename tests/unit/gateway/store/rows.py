"""Rows that the tests of the store write."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gateway.config import FeedSettings, StalenessSettings
from gateway.store import turns
from gateway.store.database import Database
from gateway.training_feed.groups import GroupReader
from gateway.training_feed.leases import Leases
from gateway.training_feed.ledger import StoredLedger
from headgate.types import Node


def episode(name: str, **others: Any) -> dict[str, Any]:
    return {
        "id": name, "key_hash": f"hash of {name}", "task_id": "t", "group_id": "g", "mode": "train", "model": "m", "details": {},
        "version": 0, "state": "open", "reason": "", "reward": None, "components": None, "created_at": 1.0, "closed_at": None,
        "agent": "", "notice": "", "error": "", "attempt": 1, **others,
    }  # fmt: skip


def call(name: str, episode_id: str, **others: Any) -> dict[str, Any]:
    return {
        "id": name, "episode_id": episode_id, "model": "m", "node": 0, "request_key": "", "api": "chat", "stream": False,
        "requested": {}, "used": {}, "logprobs_mode": "p", "engine": "e", "finish_reason": "stop", "prompt_tokens": 1,
        "completion_tokens": 1, "pauses": 0, "digest": b"", "received_at": 1.0, "first_token_s": None, "seconds": 0.1, **others,
    }  # fmt: skip


NAME, BODY = "n" * turns.NAME, "b" * turns.NAME


def turn(call_id: str, index: int = 0, **values: Any) -> tuple[list[Node], dict[str, Any]]:
    """The nodes and the call's row of one turn."""
    empty = np.empty(0, np.int32)
    node = Node(
        index, -1, 0, True, empty, np.empty(0, np.float32), empty, np.empty(0, np.uint8), 1.0, "", call_id
    )
    row = call(call_id, "e", node=index) | {"request_key": NAME + BODY}
    return [node], row | values


async def record(database: Database, *made: Any, ago_s: float = 60.0) -> None:
    """A turn whose call came so many seconds ago."""
    arrived = time.monotonic() - ago_s
    await database.submit(lambda c: turns.insert_shared_turns(c, [(made, arrived)]))


MINE = StalenessSettings(batch=2, eta=1, min_members=1)


async def leases_of(database: Database, ledger: StoredLedger, lease_s: float = 1000.0) -> Leases:
    reader = GroupReader("m", MINE)
    return await Leases.load(database, ledger, FeedSettings(lease_s=lease_s), reader)
