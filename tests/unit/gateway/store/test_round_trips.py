"""Whatever is stored comes back as it was, and in the same order, from both databases."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, insert, select, text

from gateway.config import StoreSettings
from gateway.store import columns, decisions, episode_pages, episodes, responses, turns
from gateway.store import ledger as statements
from gateway.store.columns import begins_with
from gateway.store.database import Database
from gateway.store.decisions import Decision
from gateway.store.episode_pages import EpisodeFilter
from gateway.store.models import CallRow, EpisodeRow
from headgate.errors import Conflict
from headgate.types import Node
from tests.unit.gateway.store.locks import wait_for_a_lock
from tests.unit.gateway.store.rows import call, episode

texts = st.text(st.characters(codec=None), max_size=300) | st.sampled_from(
    ["", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ufdd0", "\ufdd00000", "\U0010ffff", "%_\\'\"", " ", "\x1b"]
)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1) | st.integers()
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(texts, values, max_size=5)
many = settings(
    max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@many
@given(
    task=texts,
    details=objects,
    components=st.none() | st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False)),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    sampling=st.none() | objects,
    at=st.floats(0, 1e12),
)
def test_an_episode_comes_back_as_it_was(
    engine: Engine, task: str, details: Any, components: Any, reward: Any, sampling: Any, at: float
) -> None:
    given = {"details": details, "components": components, "reward": reward, "sampling": sampling}
    row = episode(f"e{task}", task_id=task, created_at=at, **given)
    with engine.connect() as connection:
        episodes.insert_episode(connection, row)
        found = episodes.episode(connection, f"e{task}")
        listed = episode_pages.list_episodes(connection, EpisodeFilter(task_id=task))
        connection.rollback()
    assert found == {name: value for name, value in row.items() if name != "key_hash"}
    assert listed == [found]
    assert found is not None
    assert type(found["reward"]) is type(reward)


@many
@given(request=objects, response=texts, messages=st.lists(objects, max_size=3), metadata=objects)
def test_requests_and_responses_come_back_as_they_were(
    engine: Engine, request: Any, response: str, messages: Any, metadata: Any
) -> None:
    with engine.connect() as connection:
        episodes.insert_episode(connection, episode("e"))
        exchange = {"call_id": "c", "request": request, "status": 200, "response": response}
        turns.insert_exchange(connection, call("c", "e", node=-1, requested=request), exchange)
        assert turns.exchange(connection, "e", "c") == exchange
        assert turns.calls(connection, "e")[0]["requested"] == request
        stored = {"model": "m", "metadata": metadata}
        row = responses.StoredResponse("a", "e", "m", "", messages, messages, stored, 1.5)
        responses.insert_response(connection, row)
        assert responses.response(connection, "a") == row
        assert responses.conversation(connection, "a") == messages
        connection.rollback()


@many
@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    sampled=st.booleans(),
    temperature=st.floats(allow_nan=False, allow_infinity=False),
    finish=st.sampled_from(["stop", "length", "tool_calls", "abandoned"]),
    data=st.data(),
)
def test_a_node_comes_back_as_it_was(
    engine: Engine, ids: list[int], sampled: bool, temperature: float, finish: str, data: st.DataObject
) -> None:
    logprobs = data.draw(st.lists(st.floats(width=32), min_size=len(ids), max_size=len(ids)))
    versions = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(ids), max_size=len(ids)))
    node = Node(
        0, -1, 2**31 - 1, sampled, np.asarray(ids, np.int32), np.asarray(logprobs, np.float32),
        np.asarray(versions, np.int32), np.zeros(len(ids), np.uint8), temperature, "why", "c",
    )  # fmt: skip
    with engine.connect() as connection:
        episodes.insert_episode(connection, episode("e"))
        turns.insert_turns(connection, [([node], call("c", "e", finish_reason=finish))])
        (bare,) = turns.nodes(connection, "m", ["e"])["e"]
        turns.set_reward(connection, "e", "c", -0.5)
        (found,) = turns.nodes(connection, "m", ["e"])["e"]
        connection.rollback()
    assert (bare.reward, found.reward, found.finish_reason) == (None, -0.5, finish)
    for name in ("ids", "logprobs", "versions", "flags"):
        assert getattr(found, name).tobytes() == getattr(node, name).tobytes(), name
    for name in ("index", "parent", "at", "sampled", "temperature", "mask_reason", "call_id"):
        assert getattr(found, name) == getattr(node, name), name
    assert type(found.sampled) is bool


@many
@given(names=st.lists(texts, min_size=2, max_size=12, unique=True), prefix=texts)
def test_text_is_ordered_and_begins_by_its_code_points(engine: Engine, names: list[str], prefix: str) -> None:
    plain = [name for name in names if name.isprintable()]
    with engine.connect() as connection:
        for name in names:
            connection.execute(insert(EpisodeRow), episode(name, key_hash=name, group_id=f"{prefix}{name}"))
        ordered = list(connection.scalars(select(EpisodeRow.id).order_by(EpisodeRow.id)))
        begin = select(EpisodeRow.id).where(begins_with(EpisodeRow.__table__.c.group_id, prefix))
        beginning = set(connection.scalars(begin))
        connection.rollback()
    assert [name for name in ordered if name in plain] == sorted(plain)
    assert sorted(ordered) == sorted(names)
    assert {name for name in names if not name.startswith("\U0010ffff")} <= beginning


def test_a_prefix_is_not_a_pattern_and_knows_capitals(engine: Engine) -> None:
    with engine.connect() as connection:
        episodes.insert_episode(connection, episode("e"))
        for key in ("a%b:1", "axb:1", "A%B:1", "a%"):
            connection.execute(insert(CallRow), call(f"c{key}", "e", request_key=key))
        assert [found["request_key"] for found in turns.calls_with_reply(connection, "e", "a%b")] == ["a%b:1"]
        assert turns.calls_with_reply(connection, "e", "a_b") == []


def test_groups_are_numbered_on_after_the_last(engine: Engine) -> None:
    with engine.connect() as connection:
        for number, group in enumerate(("chat-x-09", "chat-x-10", "chat-X-99", "chat-xy", "chat-x-1é")):
            episodes.insert_episode(connection, episode(f"e{number}", group_id=group))
        assert episodes.last_group(connection, "chat-x-", "m") == "chat-x-1é"
        assert episodes.last_group(connection, "chat-X-", "m") == "chat-X-99"
        assert episodes.last_group(connection, "chat-Y-", "m") is None


def test_more_ids_than_a_question_has_room_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 65_535 if engine.dialect.name == "postgresql" else 32_766
    names = [f"e{number}" for number in range(limit + 100)]
    with engine.connect() as connection:
        if (
            engine.dialect.name == "postgresql"
        ):  # building so long a statement may outlast the limit on a loaded machine
            connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
        some = (names[0], names[7], names[-1])
        for name in some:
            episodes.insert_episode(connection, episode(name, agent="x"))
            row = call(f"c{name}", name, digest=name.encode()) | {"open_to": "x"}
            connection.execute(insert(CallRow), row)
        assert sorted(row["id"] for row in episodes.by_id(connection, names)) == sorted(some)
        monkeypatch.setattr(columns, "_AT_ONCE", 2)
        assert turns.nodes(connection, "m", some) == {name: [] for name in some}
        replies = episodes.replies(connection, "x", [name.encode() for name in some])
        assert sorted(reply.episode_id for reply in replies) == sorted(some)


def test_decisions_come_back_in_order(engine: Engine) -> None:
    kinds = [f"kind{number}" for number in range(20)]
    with engine.connect() as connection:
        made = [Decision(kind, "g\0", "e", batch=n, details={"n": n}) for n, kind in enumerate(kinds)]
        decisions.insert_decisions(connection, "m", made[:10])
        for one in made[10:]:
            decisions.insert_decisions(connection, "m", [one])
        found = decisions.of_episode(connection, "e")
        assert [(row["kind"], row["group_id"], row["details"]) for row in found] == [
            (kind, "g\0", {"n": n}) for n, kind in enumerate(kinds)
        ]
        counted = decisions.counts(connection, "m", kinds, newest=5)
        assert [row["reason"] for row in counted] == [""] * 5


def test_what_is_new_in_a_tree(engine: Engine) -> None:
    empty = np.empty(0, np.int32)
    with engine.connect() as connection:
        episodes.insert_episode(connection, episode("e"))
        for index in range(6):
            node = Node(
                index, index - 1, 0, True, empty, np.empty(0, np.float32), empty, np.empty(0, np.uint8), 1.0, "", f"c{index}"
            )  # fmt: skip
            turns.insert_turns(connection, [([node], call(f"c{index}", "e", node=index))])
        turns.insert_exchange(
            connection,
            call("up", "e", node=-1),
            {"call_id": "up", "request": {}, "status": 200, "response": ""},
        )
        assert [node.index for node in turns.nodes_since(connection, "m", "e", 4)] == [4, 5]
        assert [row["id"] for row in turns.calls_since(connection, "m", "e", 4)] == ["c4", "c5"]
        assert [row["id"] for row in turns.calls_since(connection, "m", "e", 0)] == [
            f"c{n}" for n in range(6)
        ]
        assert turns.nodes_since(connection, "another", "e", 0) == []


@pytest.mark.usefixtures("idle")
async def test_a_turn_of_a_closed_episode_is_refused_and_one_in_flight_holds_the_closing_off(
    store_url: str,
) -> None:
    one, other = [await Database.open(StoreSettings(url=store_url)) for _ in range(2)]
    node = Node(0, -1, 0, True, *(np.empty(0, kind) for kind in (np.int32, np.float32, np.int32, np.uint8)))  # type: ignore[arg-type]
    closing: list[Any] = []

    def record(connection: Any) -> None:
        turns.insert_shared_turns(connection, [(([node], call("c0", "e")), time.monotonic())])
        if store_url.startswith("postgresql") and not closing:
            one._loop.call_soon_threadsafe(lambda: closing.append(close()))
            wait_for_a_lock(store_url)
            assert not closing[0].done()

    def close() -> Any:
        return other.submit(lambda c: episodes.close_episode(c, "e", {"state": "closed"}))

    await one.submit(lambda c: episodes.insert_episode(c, episode("e")))
    await one.submit(record)
    await (closing[0] if closing else close())
    again = (([node], call("c1", "e")), time.monotonic())
    with pytest.raises(Conflict, match="e is closed") as error:
        await one.submit(lambda c: turns.insert_shared_turns(c, [again]))
    assert error.value.code == "episode_closed"
    assert [row["id"] for row in await one.read(lambda c: turns.calls(c, "e"))] == ["c0"]
    assert await one.read(lambda c: statements.events(c, "m")) == []
    await one.close()
    await other.close()
