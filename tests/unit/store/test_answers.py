"""Stored answers: a list reads its own page and no more, whatever it is filtered by, on both databases."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine

from gateway.sections import StoreSettings
from gateway.store import answers, connections, episodes
from gateway.store.answers import Owner
from gateway.store.schema import bring_up_to_date
from tests.unit.store.rows import episode

STORED = 60
MINE = Owner("", "mine")
decoded: Counter[str] = Counter()


@pytest.fixture
def engine(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Counts the answers that are read, by their ids."""

    def count(kept: str | bytes) -> Any:
        value = json.loads(kept)
        if isinstance(value, dict) and "id" in value:
            decoded[value["id"]] += 1
        return value

    monkeypatch.setattr(connections, "from_json", count)
    opened = connections.connect(store_url, 2)
    bring_up_to_date(opened, StoreSettings(url=store_url))
    yield opened
    opened.dispose()


def answer(number: int, episode_id: str = "e0", **metadata: str) -> dict[str, Any]:
    name = f"a{number:03d}"
    told = {"id": name, "model": "odd" if number % 2 else "even", "metadata": metadata}
    return {
        "id": name, "episode_id": episode_id, "api": "chat", "model": "m", "previous": "", "messages": [], "input": [],
        "answer": told, "created_at": float(number // 2),
    }  # fmt: skip


def fill(connection: Connection) -> None:
    """Answers of two episodes of one agent, two at each moment, and one of somebody else."""
    for name, agent in (("e0", "mine"), ("e1", "mine"), ("e2", "another"), ("e3", "")):
        episodes.insert_episode(connection, episode(name, agent=agent))
    for number in range(STORED):
        answers.insert_answer(connection, answer(number, f"e{number % 2}", tens=str(number // 10)))
    answers.insert_answer(connection, answer(STORED, "e2"))
    answers.insert_answer(connection, answer(STORED + 1, "e3"))


def listed(connection: Connection, owner: Owner = MINE, **asked: Any) -> list[str]:
    wanted = {"model": None, "metadata": {}, "order": "asc", "limit": 5, "after": None, **asked}
    decoded.clear()
    found = answers.list_answers(connection, "chat", owner, **wanted)
    assert sum(decoded.values()) == len(found) <= wanted["limit"], "it reads what it answers"
    return [one["id"] for one in found]


def names(*numbers: int) -> list[str]:
    return [f"a{number:03d}" for number in numbers]


def test_a_list_reads_its_own_page(engine: Engine) -> None:
    with engine.connect() as connection:
        fill(connection)
        assert listed(connection) == names(0, 1, 2, 3, 4)
        assert listed(connection, order="desc", limit=3) == names(59, 58, 57)
        assert listed(connection, after="a004", limit=2) == names(5, 6)
        assert listed(connection, after="a004", limit=2, order="desc") == names(3, 2)
        assert listed(connection, model="odd", limit=2, after="a030") == names(31, 33)
        assert listed(connection, metadata={"tens": "4"}, limit=3) == names(40, 41, 42)
        assert listed(connection, metadata={"tens": "4"}, model="even", after="a047") == names(48)
        assert listed(connection, metadata={"tens": "none"}) == []
        assert listed(connection, Owner("e1", "mine"), limit=2) == names(1, 3)
        assert listed(connection, Owner("", "another")) == names(STORED)
        answers.delete_answer(connection, "a001", 1.0)
        answers.set_metadata(connection, "a059", {"tens": "1"})
        assert listed(connection, limit=2) == names(0, 2)
        assert listed(connection, metadata={"tens": "1"}, limit=1, order="desc") == names(59)


def test_answers_of_an_older_build_are_listed_once_the_gateway_has_started(
    engine: Engine, store_url: str
) -> None:
    with engine.begin() as connection:
        fill(connection)
        connection.exec_driver_sql("UPDATE answers SET agent = NULL, asked_model = NULL, labels = NULL")
    bring_up_to_date(engine, StoreSettings(url=store_url))
    with engine.connect() as connection:
        assert listed(connection, model="odd", metadata={"tens": "3"}, limit=9) == names(31, 33, 35, 37, 39)
        assert answers.fill_in(connection, 10) == 0


texts = st.text(st.sampled_from('k"\\\n,[] K\0\ud800é'), max_size=3)
pairs = st.dictionaries(texts, texts, max_size=3)


@given(has=pairs, asked=pairs)
def test_labels_hold_a_pair_if_the_metadata_does(has: dict[str, str], asked: dict[str, str]) -> None:
    kept = answers.labels_of(has)
    for key, value in asked.items():
        assert (answers.labels_of({key: value}) in kept) == (has.get(key) == value)
