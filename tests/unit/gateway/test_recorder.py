"""What a prompt that extends a recorded turn is made of."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock, create_autospec

import numpy as np
import pytest

from gateway.render.renderer import ChatRenderer
from gateway.store.database import Database
from gateway.trajectories.recorder import Recorder, TurnDetails
from gateway.trajectories.turn import Turn
from gateway.types import Sampling


@pytest.mark.parametrize(
    ("roles", "system"),
    [
        (["system", "user"], True),
        (["developer", "user"], True),
        (["user"], False),
        (["user", "system"], False),
    ],
)
async def test_the_template_is_asked_for_what_follows_the_recorded_tokens_alone(
    roles: list[str], system: bool
) -> None:
    renderer: Any = create_autospec(ChatRenderer, instance=True)
    renderer.switched.return_value = renderer
    renderer.render.return_value = [1, 2, 3]
    renderer.bridge.return_value = [6, 7]
    database: Any = create_autospec(Database, instance=True)
    database.submit = AsyncMock()
    recorder = Recorder(database, renderer, "m")
    recorder.begin("e")
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
    (history, sampled_from, appended, tools), asked = renderer.bridge.call_args
    assert (history.tolist(), sampled_from, appended, tools) == ([1, 2, 3, 4, 5], 3, new, [])
    assert asked == {"system": system}
    assert np.array_equal(prompt.ids, [1, 2, 3])
    renderer.render.assert_called_once()
