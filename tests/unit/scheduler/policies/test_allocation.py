"""Splits of nodes between sampling and training, checked by hand and against every other split."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policies.allocation import (
    AS_MEASURED,
    Hardware,
    Load,
    Points,
    Pool,
    Sampling,
    Site,
    Split,
    Training,
    neighbors,
    sensitivity,
)
from scheduler.policies.throughput import EngineModel


def even(work: float, *, trains: bool = False) -> Points:
    """A stage of `work` node-seconds, which divide evenly."""
    return Points(((1, work),), trains)


def pair(split: Split) -> tuple[int, int]:
    return split.rollout, split.train


def test_one_site_by_hand() -> None:
    # 60 / x against 20 / y on 8 nodes: 6 and 2 take 10 s each, and no other pair is as fast.
    site = Site(even(60), even(20, trains=True), Pool(8))
    best = site.best()
    assert (pair(best), best.step_s, best.cost) == ((6, 2), 10.0, 8.0)
    assert site.split(5, 3).step_s == 12.0
    # Of training, 4 s are never divided: with (6, 2) it takes 12, with (5, 3) 8.67 and 12 to sample. One node is saved.
    training = Training(samples=10, reply=1.0, prompt=1.0, token_s=0.8, fixed_s=4.0)
    assert [Site(even(60), training, Pool(8)).split(1, y).training_s for y in (1, 2)] == [20.0, 12.0]
    assert pair(Site(even(60), training, Pool(8)).best()) == (5, 2)


def test_two_sites_by_hand() -> None:
    # Sampling takes 100 / 10 = 10 s on its whole pool; training on 8 nodes would take 3: 3 nodes take 8 s, 2 nodes 12.
    site = Site(even(100), even(24), Pool(10), Pool(8))
    assert pair(site.best()) == (10, 3)
    # The other way round: training is slower with all it has, and sampling needs only 4 nodes for as fast.
    slow = Site(even(100), even(200), Pool(10), Pool(8))
    assert (pair(slow.best()), slow.best().step_s) == ((4, 8), 25.0)


def test_hardware_has_speed_and_cost() -> None:
    # StreamRL's units: an H800 costs 2.85 H20s. It samples here twice as fast, and trains six times as fast.
    h20, h800 = Hardware(), Hardware(cost=2.85, generation=2.0, training=6.0)
    site = Site(even(100), even(240), Pool(20, h20), Pool(10, h800))
    best = site.best()
    assert (pair(best), best.generation_s, best.training_s) == ((20, 8), 5.0, 5.0)
    assert best.cost == pytest.approx(20 + 8 * 2.85)
    assert site.split(5, 2).cost == pytest.approx(5 + 2 * 2.85)


def test_points_between_and_beyond() -> None:
    points = Points(((2, 30.0), (4, 20.0)))  # 60 and 80 node-seconds
    assert [points.seconds(n, AS_MEASURED) for n in (1, 2, 3, 4, 8)] == [60.0, 30.0, 70 / 3, 20.0, 10.0]
    assert points.seconds(2, Load(length=1.2, training=3.0)) == pytest.approx(36.0)
    assert even(10, trains=True).seconds(1, Load(length=1.2, training=0.5)) == pytest.approx(6.0)


def test_sampling_by_hand() -> None:
    engine = EngineModel(s_per_kv_token=0.0, s_per_batch=0.010, s_per_call=0.001, s_per_step=0.010)
    sampling = Sampling(engine, samples=160, reply=100.0, longest=100.0, most=32)
    # On 1 node 160 replies run in 5 waves of 32, of 100 steps of 42 ms; on 5 nodes one wave; on 20 nodes one of 8, 20 ms.
    assert [sampling.seconds(n, AS_MEASURED) for n in (1, 5, 20)] == pytest.approx([21.0, 4.2, 2.0])
    tail = Sampling(engine, samples=160, reply=100.0, longest=1000.0, most=32)
    assert [tail.seconds(n, AS_MEASURED) for n in (1, 5)] == pytest.approx(
        [21.0, 20.0]
    )  # 1,000 steps of 20 ms
    assert tail.seconds(5, Load(length=0.5)) == pytest.approx(10.0)
    with_cache = Sampling(EngineModel(1e-5, 0.0, 0.0, 0.01), samples=2, reply=100.0, longest=0, prompt=50.0)
    assert with_cache.seconds(1, AS_MEASURED) == pytest.approx(100 * (0.01 + 1e-5 * 2 * 100))


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="a node that samples and one that trains"):
        Site(even(1), even(1), Pool(1)).best()
    with pytest.raises(ValueError, match="a node that samples"):
        Site(even(1), even(1), Pool(3), Pool(0)).best()


def test_neighbors_and_sensitivity_by_hand() -> None:
    site = Site(even(60), even(20, trains=True), Pool(8))
    best = site.best()
    assert {pair(split) for split in neighbors(site, best)} == {(5, 3), (5, 2), (6, 1), (7, 1)}
    found = {one.name: one for one in sensitivity(site, best)}
    longer, slower = found["length +20%"], found["training +20%"]
    assert (longer.chosen.step_s, pair(longer.best), longer.loss) == (12.0, (6, 2), 0.0)
    # Training takes 24 / y: 12 s with 2 nodes, and 12 s is what the best split, (5, 3) or (6, 2), takes too.
    assert (slower.chosen.step_s, slower.best.step_s, slower.loss) == (12.0, 12.0, 0.0)
    lopsided = sensitivity(site, site.split(7, 1))
    assert {one.name: round(one.loss, 3) for one in lopsided}["training +20%"] == 1.0


seconds = st.floats(0.01, 1000)
points = st.dictionaries(st.integers(1, 9), seconds, min_size=1, max_size=5).map(
    lambda found: Points(tuple(sorted(found.items())))
)
stages = points | st.builds(
    Sampling,
    st.builds(EngineModel, st.just(1e-7), st.floats(1e-3, 1e-1), st.floats(1e-5, 1e-2), st.just(1e-3)),
    samples=st.integers(1, 300),
    reply=st.floats(1, 500),
    longest=st.floats(1, 2000),
    most=st.integers(1, 64),
)
hardware = st.builds(Hardware, st.sampled_from([1.0, 2.85]), st.floats(0.2, 5), st.floats(0.2, 5))
pools = st.builds(Pool, st.integers(2, 14), hardware)
sites = st.builds(Site, stages, stages, pools, st.none() | pools)


@given(sites, st.builds(Load, st.floats(0.5, 2), st.floats(0.5, 2)))
def test_no_other_split_is_better(site: Site, load: Load) -> None:
    """Brute force over all splits by the same model, those of curves that do not fall included."""
    best = site.best(load)
    assert site.allows(best.rollout, best.train)
    most = max(site.rollout.nodes, site.train.nodes if site.train else 0)
    every = [
        site.split(x, y, load) for x in range(1, most + 1) for y in range(1, most + 1) if site.allows(x, y)
    ]
    fastest = min(split.step_s for split in every)
    assert best.step_s == fastest
    assert best.cost == min(split.cost for split in every if split.step_s == fastest)
    assert not math.isinf(best.step_s)
