"""A running call as bytes, and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bus.base import Log
from gateway.generation import log_format
from gateway.trajectories.recorder import TurnDetails
from gateway.trajectories.turn import Turn
from headgate.types import Sampling

PROMPT = np.asarray([5, 2**31 - 1, 0], np.int32)
USED = Sampling(0.7, 0.9, 6, None, [256, 258], logit_bias={7: -1.5})
DETAILS = TurnDetails("chat", True, {"n": 1}, USED, 12.5, 0.25, request_key="name" + "body")


def turn_of(ids: list[int]) -> Turn:
    """Two runs; the weights changed under the second, and the engine never reported when."""
    turn = Turn("call", engine="engine-0", pauses=1)
    half = len(ids) // 2
    turn.begin_run(3)
    turn.append(ids[:half], [-0.5] * half)
    turn.begin_run(4)
    turn.weights_changed(5)
    turn.append(ids[half:], [-0.25] * (len(ids) - half))
    return turn


def log_of(turn: Turn, details: TurnDetails = DETAILS) -> Log:
    state, body = log_format.state_of(turn, details), log_format.body_of(turn, 0)
    return Log("call", "a", 1, None, log_format.head_of(PROMPT, details), state, body, 0.0)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_what_was_logged_is_read(ids: list[int]) -> None:
    turn = turn_of(ids)
    call = log_format.read(log_of(turn))
    assert call is not None and call.details == DETAILS
    assert call.request_key == "namebody"
    assert call.prompt.tolist() == PROMPT.tolist()
    for name in ("call_id", "ids", "logprobs", "spans", "engine", "pauses", "disputed"):
        assert getattr(call.turn, name) == getattr(turn, name), name


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.data())
def test_parts_make_the_whole(ids: list[int], data: st.DataObject) -> None:
    turn, cut = turn_of(ids), data.draw(st.integers(0, len(ids)))
    head = log_format.body_of(turn, 0)[: cut * log_format.TOKEN_BYTES]
    assert head + log_format.body_of(turn, cut) == log_format.body_of(turn, 0)


def test_a_log_that_is_not_whole_is_not_used() -> None:
    log = log_of(turn_of([1, 2, 3]))
    assert log_format.read(replace(log, body=log.body[:-1])) is None
    assert log_format.read(replace(log, state=log_format.state_of(turn_of([1, 2, 3, 4]), DETAILS))) is None
    longer = log_format.read(replace(log, body=log.body + b"more"))
    assert longer is not None and longer.turn.ids == [1, 2, 3], "the state has the number of tokens"


def test_of_a_call_whose_sampler_has_a_state_there_is_only_its_key() -> None:
    details = replace(DETAILS, used=replace(USED, seed=1))
    call = log_format.read(log_of(turn_of([1, 2]), details))
    assert call is not None and call.details is None and call.request_key == "namebody"
    assert call.turn.ids == []


@pytest.mark.parametrize(
    ("ids", "finish"),
    [([], None), ([1, 2], None), ([1, 258], "stop"), ([256, 1], None), ([1] * 6, "length"), ([1] * 5, None)],
)
def test_what_ended_is_not_gone_on_with(ids: list[int], finish: str | None) -> None:
    assert log_format.finish_of(turn_of(ids), USED) == finish
