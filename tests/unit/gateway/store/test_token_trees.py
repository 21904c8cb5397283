"""The token tree of an episode that several recorders write to: each goes on from what all of them have stored."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest
from sqlalchemy import Connection

from gateway.config import StoreSettings
from gateway.render.renderer import Message
from gateway.store import episodes, turns
from gateway.store.database import Database
from gateway.trajectories.recorder import Exclusivity, Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from headgate.types import Node, Sampling
from tests.harness.waiting import until
from tests.unit.gateway.store.rows import episode


class Template:
    """Writes a message as the codes of its letters. Sampled ids are above all of them, so no rendering has a reply's ids."""

    vision = None

    def switched(self, _switches: Any) -> Template:
        return self

    def render(self, messages: Sequence[Message], _tools: Any) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"]]

    def bridge(
        self, _history: Any, _sampled_from: int, new: Sequence[Message], tools: Any, *, system: bool
    ) -> list[int]:
        return self.render(new, tools)


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(StoreSettings(url=store_url))
    await opened.submit(lambda c: episodes.insert_episode(c, episode("e")))
    yield opened
    await opened.close()


def recorder_of(database: Database, model: str = "m", *, shared: bool = True) -> Recorder:
    exclusivity = AsyncMock(Exclusivity)
    exclusivity.serves_exclusively.return_value = False
    return Recorder(database, cast(Any, Template()), model, exclusivity if shared else None)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def response(
    recorder: Recorder, conversation: list[Message], text: str, *ids: int, episode_id: str = "e"
) -> list[int]:
    """Reply to a conversation with sampled ids, which mean `text`; returns the prompt's ids."""
    prompt = await recorder.prepare(episode_id, conversation, [])
    turn = Turn(f"call-{ids[0]}")
    turn.begin_run(3)
    turn.append(list(ids), [-0.5] * len(ids))
    reply: Message = {"role": "assistant", "content": text}
    await recorder.record(episode_id, prompt, turn, TurnDetails("chat", False, {}, Sampling(), 0.0), reply)
    conversation.append(reply)
    return prompt.ids.tolist()


def values(nodes: Sequence[Node]) -> list[Any]:
    """Return the arrays and positions of nodes, with the types of their numbers."""
    arrays = [(node.ids, node.logprobs, node.versions, node.flags) for node in nodes]
    return [
        (node.index, node.parent, node.at, node.sampled, [(a.dtype, a.tolist()) for a in some])
        for node, some in zip(nodes, arrays, strict=True)
    ]


async def test_processes_go_on_with_each_others_replies(database: Database) -> None:
    one, other = recorder_of(database), recorder_of(database)
    one.begin("e")
    talk, ids = [user("a")], [ord("a")]
    for recorder, sampled in ((one, 1001), (other, 1002), (one, 1003), (other, 1004), (one, 1005)):
        assert await response(recorder, talk, "yes", sampled) == ids
        talk.append(user("b"))
        ids += [sampled, ord("b")]
    await other.prepare("e", talk, [])
    stored = values(await database.read(lambda c: turns.nodes(c, "m", ["e"])["e"]))
    assert len(stored) == 10
    for recorder in (one, other):
        assert values(recorder._trees["e"].tree.nodes) == stored


async def test_after_a_restart_a_model_goes_on_with_its_own_replies_alone(database: Database) -> None:
    """Both models have a node of each number."""
    mine, others = [user("x")], [user("a")]
    await response(recorder_of(database, "m", shared=False), mine, "yes", 1001)
    await response(recorder_of(database, "n", shared=False), others, "yes", 1002)
    restarted = recorder_of(database, "m", shared=False)
    rendered = [ord(letter) for letter in "ayesb"]
    assert (await restarted.prepare("e", [*others, user("b")], [])).ids.tolist() == rendered
    assert (await restarted.prepare("e", [*mine, user("b")], [])).ids.tolist() == [ord("x"), 1001, ord("b")]


async def test_a_process_that_serves_an_episode_alone_does_not_read_it_again(database: Database) -> None:
    exclusivity = AsyncMock(Exclusivity)
    exclusivity.serves_exclusively.return_value = True
    recorder = Recorder(database, cast(Any, Template()), "m", exclusivity)
    talk, ids = [user("a")], [ord("a")]
    await response(recorder, talk, "yes", 1001)
    talk.append(user("b"))
    with patch.object(database, "read", side_effect=AssertionError("it was read")):
        assert await response(recorder, talk, "yes", 1002) == [*ids, 1001, ord("b")]
    exclusivity.serves_exclusively.return_value = False
    other = [*talk, user("c")]
    await response(recorder_of(database), other, "no", 1003)
    expected = [ord("a"), 1001, ord("b"), 1002, ord("c"), 1003, ord("d")]
    assert (await recorder.prepare("e", [*other, user("d")], [])).ids.tolist() == expected


async def test_only_turns_that_lost_a_race_are_written_again(database: Database) -> None:
    await database.submit(lambda c: episodes.insert_episode(c, episode("f")))
    one, other = recorder_of(database), recorder_of(database)
    talks = {"e": [user("a")], "f": [user("a")]}
    for name, talk in talks.items():
        await one.prepare(name, talk, [])
    await response(other, [user("z")], "no", 1000)
    written, begun, go_on = [], threading.Event(), threading.Event()
    insert = turns.insert_shared_turns

    def counting(connection: Connection, made: Sequence[Any]) -> None:
        written.append([call["episode_id"] for (_, call), _ in made])
        insert(connection, made)

    def hold(_connection: Connection) -> None:
        begun.set()
        assert go_on.wait(60)

    with patch.object(turns, "insert_shared_turns", counting):
        held = database.put(hold)
        assert await asyncio.to_thread(begun.wait, 60)  # what follows is of the next transaction
        with patch.object(one, "_refresh", AsyncMock()):  # what was prepared is old by now
            ids = itertools.count(2000)
            recording = [
                asyncio.create_task(response(one, talk, "yes", next(ids), episode_id=name))
                for name, talk in talks.items()
                for _ in range(2)
            ]
            await until(lambda: database.pending == 5, "all four are to be written")
            go_on.set()
            await asyncio.gather(held, *recording)
    assert written[0] == ["e", "e", "f", "f"]
    assert sum(len(names) for names in written[1:]) >= 4
    stored = await database.read(lambda c: turns.nodes(c, "m", ["e", "f"]))
    for name, (first, *others) in {"e": (1000, 2000, 2001), "f": (None, 2002, 2003)}.items():
        sampled = [node.ids.tolist() for node in stored[name] if node.sampled]
        assert sorted(sampled) == [[token] for token in (first, *others) if token is not None]
    assert len(await database.read(lambda c: turns.calls(c, "f"))) == 2
