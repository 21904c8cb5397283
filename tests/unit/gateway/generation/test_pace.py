"""Chunk sizes, computed from the token rate of the last second."""

from __future__ import annotations

import pytest

from gateway.generation.pace import MOST_TOKENS, Pace


def after(rate: int, seconds: int = 3, chunks_per_s: float = 1000.0) -> Pace:
    """Return a pace after `rate` tokens per second were counted for `seconds`."""
    pace = Pace(chunks_per_s)
    for tick in range(seconds * 100):
        pace.count(rate // 100, tick / 100)
    return pace


@pytest.mark.parametrize(
    ("rate", "interval"), [(0, 1), (500, 1), (1000, 1), (1100, 2), (3900, 4), (10**6, MOST_TOKENS)]
)
def test_chunks_of_all_streams_stay_within_the_number(rate: int, interval: int) -> None:
    assert after(rate).interval(3.0) == interval


def test_one_token_a_chunk_again_once_it_is_quiet() -> None:
    pace = after(5000)
    assert pace.interval(3.0) == 5
    assert [pace.interval(at) for at in (3.9, 4.1, 10.0)] == [5, 1, 1]
    pace.count(1, 10.0)
    pace.count(1, 11.1)
    assert pace.interval(11.1) == 1


def test_a_process_that_has_just_begun_gives_single_tokens() -> None:
    assert Pace().interval(0.0) == 1
    assert Pace().interval(1e6) == 1
