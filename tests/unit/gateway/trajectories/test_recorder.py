"""Contents of a prompt that extends a recorded turn, and the stored form of a turn."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest.mock import AsyncMock, create_autospec

import numpy as np
import pytest

from gateway.render.renderer import ChatRenderer
from gateway.store.database import Database
from gateway.trajectories.recorder import Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from headgate.errors import Unavailable
from headgate.types import Sampling, TokenFlag
from tests.harness.waiting import turns


def recorder_of(renderer: Any) -> tuple[Recorder, AsyncMock]:
    """Return a recorder that knows the new episode `e`, and the store's writer."""
    database: Any = create_autospec(Database, instance=True)
    database.submit = AsyncMock()
    recorder = Recorder(database, renderer, "m")
    recorder.begin("e")
    return recorder, database.submit


@pytest.mark.parametrize(
    ("roles", "system"),
    [
        (["system", "user"], True),
        (["developer", "user"], True),
        (["user"], False),
        (["user", "system"], False),
    ],
)
async def test_the_template_renders_only_what_follows_the_recorded_tokens(
    roles: list[str], system: bool
) -> None:
    renderer: Any = create_autospec(ChatRenderer, instance=True)
    renderer.switched.return_value = renderer
    renderer.render.return_value = [1, 2, 3]
    renderer.vision = None
    renderer.bridge.return_value = [6, 7]
    recorder, _ = recorder_of(renderer)
    messages: list[Any] = [{"role": role, "content": role} for role in roles]
    prompt = await recorder.prepare("e", messages, [])
    turn = Turn("c")
    turn.begin_run(0)
    turn.append([4, 5], [-0.5, -0.5])
    reply = {"role": "assistant", "content": "yes"}
    await recorder.record("e", prompt, turn, TurnDetails("chat", False, {}, Sampling(), 0.0), reply)
    new: list[Any] = [{"role": "user", "content": "go on"}]
    following = await recorder.prepare("e", [*messages, reply, *new], [])
    assert following.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    (history, sampled_from, appended, tools), options = renderer.bridge.call_args
    assert (history.tolist(), sampled_from, appended, tools) == ([1, 2, 3, 4, 5], 3, new, [])
    assert options == {"system": system}
    assert np.array_equal(prompt.ids, [1, 2, 3])
    renderer.render.assert_called_once()


async def test_a_call_that_was_stored_after_its_episodes_nodes_were_read_is_left_for_later() -> None:
    """Another process stores a turn between the two queries."""
    renderer: Any = create_autospec(ChatRenderer, instance=True)
    renderer.switched.return_value = renderer
    renderer.render.return_value = [1, 2, 3]
    renderer.vision = None
    database: Any = create_autospec(Database, instance=True)
    database.read.return_value = [], [{"id": "c", "node": 1, "digest": b"of its end", "used": {}}]
    prompt = await Recorder(database, renderer, "m").prepare("e", [{"role": "user", "content": "hi"}], [])
    assert prompt.ids.tolist() == [1, 2, 3]


async def test_each_token_is_stored_with_its_version_and_with_what_is_wrong_with_it() -> None:
    recorder, submit = recorder_of(create_autospec(ChatRenderer, instance=True))
    turn = Turn("c")
    turn.begin_run(3)
    turn.append([4, 5], [-0.5, math.nan])
    turn.weights_changed(4)
    turn.append([6], [-0.5])
    greedy = Sampling(temperature=0.0)
    await recorder.record(
        "e", await recorder.encode_prompt([1, 2]), turn, TurnDetails("chat", False, {}, greedy, 0.0), None
    )
    (prompt, sampled), call = submit.call_args.args[0].row
    assert (prompt.ids.tolist(), prompt.sampled, sampled.ids.tolist()) == ([1, 2], False, [4, 5, 6])
    assert (sampled.versions.tolist(), sampled.newest.tolist()) == ([3, 3, 3], [3, 3, 4])
    assert sampled.flags.tolist() == [
        TokenFlag.GREEDY, TokenFlag.GREEDY | TokenFlag.INVALID_LOGPROB, TokenFlag.GREEDY | TokenFlag.UNCONFIRMED
    ]  # fmt: skip
    assert (sampled.mask_reason, sampled.call_id, call["node"]) == ("", "c", sampled.index)


@pytest.mark.parametrize(("known", "stored"), [("", "unconfirmed_version"), ("abandoned", "abandoned")])
async def test_a_turn_whose_account_is_false_is_not_trained(known: str, stored: str) -> None:
    recorder, submit = recorder_of(create_autospec(ChatRenderer, instance=True))
    turn = Turn("c")
    turn.begin_run(3)
    turn.append([4], [-0.5])
    turn.end_run([("9", 1)])
    details = TurnDetails("chat", False, {}, Sampling(), 0.0, mask_reason=known)
    await recorder.record("e", await recorder.encode_prompt([1, 2]), turn, details, None)
    (_, sampled), _ = submit.call_args.args[0].row
    assert sampled.mask_reason == stored


def turn_of(call: str) -> Turn:
    turn = Turn(call)
    turn.begin_run(0)
    turn.append([4, 5], [-0.5, -0.5])
    return turn


DETAILS = TurnDetails("chat", False, {}, Sampling(), 0.0)


async def test_a_turn_that_could_not_be_stored_is_in_no_tree() -> None:
    """Otherwise the next turn would hang on nodes that the store does not have."""
    recorder, submit = recorder_of(create_autospec(ChatRenderer, instance=True))
    database: Any = recorder._database
    database.read.return_value = [], []
    submit.side_effect = Unavailable("no disk", retry_after=1.0, code="store_unavailable")
    with pytest.raises(Unavailable):
        await recorder.record("e", await recorder.encode_prompt([1, 2]), turn_of("lost"), DETAILS, None)
    submit.side_effect = None
    await recorder.record("e", await recorder.encode_prompt([1, 2]), turn_of("kept"), DETAILS, None)
    nodes, call = submit.call_args.args[0].row
    assert [(node.index, node.parent) for node in nodes] == [(0, -1), (1, 0)]
    assert call["node"] == 1


async def test_calls_that_load_an_episode_concurrently_share_its_tree() -> None:
    recorder, submit = recorder_of(create_autospec(ChatRenderer, instance=True))
    recorder.forget("e")
    database: Any = recorder._database
    reading = asyncio.Event()

    async def read(_query: Any) -> Any:
        await reading.wait()
        return [], []

    database.read.side_effect = read
    given = [await recorder.encode_prompt([1, 2]), await recorder.encode_prompt([1, 3])]
    calls = [
        asyncio.create_task(recorder.record("e", prompt, turn_of(f"c{i}"), DETAILS, None))
        for i, prompt in enumerate(given)
    ]
    await turns()
    reading.set()
    await asyncio.gather(*calls)
    stored = [write.args[0].row[0] for write in submit.call_args_list]
    assert [node.index for nodes in stored for node in nodes] == list(range(sum(map(len, stored)))), (
        "one tree gave all numbers"
    )
