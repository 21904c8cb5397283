"""How copies of a version spread: into each zone once, and within it in a tree from who has it."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headgate.weights.fan_out import fan_out
from tests.faults.virtual.clock import Clock, VirtualLoop
from tests.harness.waiting import turns

LINK_S, COPY_S = 10.0, 1.0
"""Seconds of a copy over the link between zones, and within one."""


@given(
    st.lists(st.sampled_from(["", "", "a", "b"]), max_size=40),
    st.integers(1, 3),
    st.sets(st.integers(0, 39)),
    st.randoms(use_true_random=False),
)
def test_every_mirror_fetches_once_from_one_of_its_zone_that_has_it(
    zone_of: list[str], width: int, broken: set[int], random: object
) -> None:
    zones = {f"m{i}": zone for i, zone in enumerate(zone_of)}
    fails = {f"m{i}" for i in broken} & zones.keys()
    has, busy, fetched, crossed = {"root"}, Counter[str](), Counter[str](), Counter[str]()

    async def fetch(mirror: str, sources: list[str]) -> None:
        source, zone = sources[0], zones[mirror]
        assert source in has
        assert sources[-1] == "root"
        assert source == "root" or zones[source] == zone
        crossing = source == "root" and bool(zone)
        busy[source] += not crossing
        assert busy[source] <= width, "a source serves at most `width` of its zone concurrently"
        await turns(random.randrange(4))  # type: ignore[attr-defined]
        busy[source] -= not crossing
        fetched[mirror] += 1
        if mirror in fails:
            raise OSError("away")
        has.add(mirror)
        crossed[zone] += crossing

    failed = asyncio.run(fan_out("root", zones, fetch, width))
    assert failed.keys() == fails
    assert fetched == Counter(list(zones))
    assert has == {"root", *zones} - fails
    assert all(count <= 1 for count in crossed.values()), "a version goes into a zone once"


def spread(engines: int) -> tuple[float, int]:
    """Spread a version to this many engines in three zones; return the seconds to the last, and the crossings of the link."""
    loop, crossings = VirtualLoop(Clock(0.0)), 0
    zones = {f"m{i}": ("", "a", "b")[i % 3] for i in range(engines)}

    async def fetch(mirror: str, sources: list[str]) -> None:
        nonlocal crossings
        crossing = sources[0] == "root" and bool(zones[mirror])
        crossings += crossing
        await asyncio.sleep(LINK_S if crossing else COPY_S)  # noqa: TID251 - virtual time

    assert not loop.run(fan_out("root", zones, fetch), limit_s=1000.0)
    seconds = loop.time()
    loop.end()
    return seconds, crossings


def test_the_time_to_the_last_engine_grows_with_the_logarithm() -> None:
    """Those who have it serve two others at a time, so their number triples with each copy."""
    for engines, copies in ((3, 0), (9, 1), (27, 2), (64, 3), (243, 4)):
        seconds, crossings = spread(engines)
        assert (round(seconds, 1), crossings) == (LINK_S + copies * COPY_S, 2)
