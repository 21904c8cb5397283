"""The token tree of an episode that several recorders write to: each goes on from what all of them have stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest

from gateway.render.renderer import Message
from gateway.sections import StoreSettings
from gateway.store import episodes, turns
from gateway.store.database import Database
from gateway.trajectories.recorder import Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from gateway.types import Node, Sampling
from tests.unit.store.rows import episode


class Template:
    """Writes a message as the codes of its letters. Sampled ids are above all of them, so nobody can render a reply's ids."""

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
    return Recorder(database, cast(Any, Template()), model, shared=shared)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def answer(recorder: Recorder, asked: list[Message], text: str, *ids: int) -> list[int]:
    """Replies to a conversation with sampled ids, which mean `text`; returns the prompt's ids."""
    prompt = await recorder.prepare("e", asked, [])
    turn = Turn(f"call-{ids[0]}")
    turn.begin_run(3)
    turn.append(list(ids), [-0.5] * len(ids))
    reply: Message = {"role": "assistant", "content": text}
    await recorder.record("e", prompt, turn, TurnDetails("chat", False, {}, Sampling(), 0.0), reply)
    asked.append(reply)
    return prompt.ids.tolist()


def values(nodes: Sequence[Node]) -> list[Any]:
    """The arrays and positions of nodes, with the types of their numbers."""
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
        assert await answer(recorder, talk, "yes", sampled) == ids
        talk.append(user("b"))
        ids += [sampled, ord("b")]
    await other.prepare("e", talk, [])
    stored = values(await database.read(lambda c: turns.nodes(c, "m", ["e"])["e"]))
    assert len(stored) == 10
    for recorder in (one, other):
        assert values(recorder._lineages["e"].tree.nodes) == stored


async def test_after_a_restart_a_model_goes_on_with_its_own_replies_alone(database: Database) -> None:
    """Both models have a node of each number."""
    mine, others = [user("x")], [user("a")]
    await answer(recorder_of(database, "m", shared=False), mine, "yes", 1001)
    await answer(recorder_of(database, "n", shared=False), others, "yes", 1002)
    restarted = recorder_of(database, "m", shared=False)
    rendered = [ord(letter) for letter in "ayesb"]
    assert (await restarted.prepare("e", [*others, user("b")], [])).ids.tolist() == rendered
    assert (await restarted.prepare("e", [*mine, user("b")], [])).ids.tolist() == [ord("x"), 1001, ord("b")]
