"""Whose conversations a deletion finds, and what is left of an erased one, on both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from gateway.store import episodes as statements
from gateway.store import erasure
from gateway.store.erasure import Deletion
from gateway.store.models import CallRow, EpisodeRow, NodeRow


def episode(
    connection: Connection, name: str, requested: dict[str, Any], agent: str = "a", at: float = 1.0
) -> None:
    row = {
        "id": name, "key_hash": name, "task_id": "t", "group_id": name, "mode": "eval", "model": "m", "details": {"text": "x"},
        "version": 0, "state": "closed", "reason": "rewarded", "created_at": at, "closed_at": at, "agent": agent,
    }  # fmt: skip
    statements.insert_episode(connection, row)
    call = {
        "id": f"{name}-0", "episode_id": name, "model": "m", "node": 0, "request_key": "k", "api": "chat",
        "stream": False, "requested": requested, "used": {}, "logprobs_mode": "", "engine": "e", "finish_reason": "stop",
        "prompt_tokens": 1, "completion_tokens": 2, "pauses": 0, "digest": b"d", "received_at": at, "seconds": 1.0,
    }  # fmt: skip
    connection.execute(insert(CallRow), call)
    node = {
        "episode_id": name, "model": "m", "index": 0, "parent": -1, "at": 0, "sampled": True, "ids": b"\1\0\0\0\2\0\0\0",
        "logprobs": b"12345678", "spans": [[0, 2]], "flags": b"\0\0", "temperature": 1.0, "mask_reason": "",
        "call_id": f"{name}-0", "images": None, "kept": b"k",
    }  # fmt: skip
    connection.execute(insert(NodeRow), node)


def of(agent: str = "a", *users: str, at: float = 5.0) -> Deletion:
    return Deletion("del-1", at, None, agent, list(users), [])


@pytest.mark.parametrize(
    "requested",
    [{"user": "u"}, {"safety_identifier": "u"}, {"metadata": {"user_id": "u"}}, {"metadata": {"user": "u"}}],
)
def test_a_user_is_found_wherever_a_request_has_the_id(
    connection: Connection, requested: dict[str, Any]
) -> None:
    episode(connection, "own", requested)
    episode(connection, "other", {"user": "other", "metadata": {"note": "u"}})
    episode(connection, "of-another-agent", requested, agent="b")
    episode(connection, "later", requested, at=9.0)
    assert erasure.found(connection, of("a", "u", "form")) == {"own": "closed"}
    assert set(erasure.found(connection, of("a"))) == {"own", "other"}


def test_an_erased_episode_keeps_its_numbers_alone(connection: Connection) -> None:
    episode(connection, "own", {"user": "u"})
    erasure.add(connection, of("a", "u"))
    for _ in range(2):  # as after a crash
        erasure.wipe(connection, "own")
    erasure.erase(connection, "del-1", ["own"])
    node = connection.execute(select(*NodeRow.__table__.c)).mappings().one()
    assert (node["ids"], node["logprobs"], node["kept"], node["mask_reason"]) == (
        bytes(8),
        bytes(8),
        None,
        "deleted",
    )
    call = connection.execute(select(*CallRow.__table__.c)).mappings().one()
    assert (call["requested"], call["digest"], call["request_key"], call["completion_tokens"]) == (
        {},
        b"",
        "",
        2,
    )
    row = connection.execute(select(*EpisodeRow.__table__.c)).mappings().one()
    assert (row["details"], row["notice"], row["reason"]) == ({}, "deleted", "rewarded")
    erasure.finish(connection, "del-1", 6.0)
    (deletion,) = erasure.deletions(connection)
    assert (deletion.users, deletion.episodes, deletion.done_at) == ([], ["own"], 6.0)
    assert erasure.deletions(connection, unfinished=True) == []
