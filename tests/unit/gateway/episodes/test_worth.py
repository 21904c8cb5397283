"""The worth of an episode's reward: the words for an agent whose calls were refused."""

from __future__ import annotations

import pytest

from gateway.episodes.worth import without_calls
from gateway.store.sampled import Sampled


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (1, "a call of the agent was refused with 400 bad: no"),
        (2, "2 calls of the agent were refused, the last with 400 bad: no"),
    ],
)
def test_refused_calls_are_the_reason_for_an_episode_without_tokens(refused: int, words: str) -> None:
    end = without_calls("train", "m", Sampled(refused=refused, last_refusal="400 bad: no"))
    assert end is not None
    assert end.values["error"] == f"the agent sampled nothing from m: {words}"
