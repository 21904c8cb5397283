"""How copies of a version spread: each mirror once, from who has it, the root sending few."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headgate.weights.fan_out import fan_out
from tests.harness.waiting import turns


@given(st.integers(0, 40), st.integers(1, 3), st.sets(st.integers(0, 39)), st.randoms(use_true_random=False))
def test_every_mirror_fetches_once_from_one_that_has_it(
    count: int, width: int, broken: set[int], random: object
) -> None:
    mirrors = [f"m{i}" for i in range(count)]
    fails = {f"m{i}" for i in broken if i < count}
    has, busy, fetched, rounds = {"root"}, Counter[str](), Counter[str](), Counter[str]()

    async def fetch(mirror: str, sources: list[str]) -> None:
        source = sources[0]
        assert source in has
        assert sources[-1] == "root"
        busy[source] += 1
        assert busy[source] <= width, "a source serves at most `width` concurrently"
        await turns(random.randrange(4))  # type: ignore[attr-defined]
        busy[source] -= 1
        fetched[mirror] += 1
        rounds[source] += 1
        if mirror in fails:
            raise OSError("away")
        has.add(mirror)

    failed = asyncio.run(fan_out("root", mirrors, fetch, width))
    assert failed.keys() == fails
    assert fetched == Counter(mirrors)
    assert has == {"root", *mirrors} - fails
