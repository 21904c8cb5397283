"""Choice of an engine for a call."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.cached import CALL_TOKENS, EngineLoad, choose


def test_among_equals_the_first_by_name() -> None:
    assert choose([EngineLoad("b", 1), EngineLoad("a", 1)]) == "a"


def test_a_call_stays_where_its_prefix_is_cached_until_the_load_outweighs_it() -> None:
    """A call more is worth CALL_TOKENS tokens of prefill: three calls' worth are kept for three calls, not for four."""
    for least in (0, 5, 100):
        idle, cached = EngineLoad("a", least), 3 * CALL_TOKENS
        assert choose([idle, EngineLoad("b", least + 3, cached)]) == "b"
        assert choose([idle, EngineLoad("b", least + 4, cached)]) == "a"
        assert choose([replace(idle, cached=10), EngineLoad("b", least + 3, cached)]) == "a"


def test_an_engine_is_avoided_while_there_is_another() -> None:
    full, mine = EngineLoad("a", 90), EngineLoad("b", 0, cached=500)
    assert choose([full, mine], frozenset({"b"})) == "a"
    assert choose([mine], frozenset({"b"})) == "b"
    assert choose([full, mine], frozenset({"a", "b"})) == "b"
    assert choose([full, mine], frozenset({"gone"})) == "b"


def test_without_engines_there_is_none() -> None:
    assert choose([]) is None
    assert choose([], frozenset({"a"})) is None


LOADS = st.lists(
    st.builds(
        EngineLoad, st.sampled_from("abcdef"), st.integers(0, 6), st.sampled_from([0, 0, 10, 256, 257, 512])
    ),
    unique_by=lambda engine: engine.name,
    min_size=1,
)
AVOID = st.frozensets(st.sampled_from("abcdef"), max_size=3)


@settings(deadline=None)
@given(LOADS.flatmap(lambda loads: st.tuples(st.just(loads), st.permutations(loads))), AVOID)
def test_their_order_does_not_matter(
    orders: tuple[list[EngineLoad], list[EngineLoad]], avoid: frozenset[str]
) -> None:
    one, other = orders
    assert choose(one, avoid) == choose(other, avoid)


@settings(deadline=None)
@given(LOADS, AVOID)
def test_the_choice_is_one_of_those_that_are_wanted_and_none_of_these_is_better(
    loads: list[EngineLoad], avoid: frozenset[str]
) -> None:
    chosen = next(engine for engine in loads if engine.name == choose(loads, avoid))
    wanted = [engine for engine in loads if engine.name not in avoid] or loads
    assert chosen in wanted
    for other in wanted:
        gain = other.cached - chosen.cached
        assert gain <= (other.running - chosen.running) * CALL_TOKENS
        assert other.running > chosen.running or gain <= 0


@settings(deadline=None)
@given(LOADS, AVOID)
def test_the_chosen_stays_chosen_when_more_of_it_is_cached_or_less_runs(
    loads: list[EngineLoad], avoid: frozenset[str]
) -> None:
    name = choose(loads, avoid)
    for engine in loads:
        others = [other for other in loads if other is not engine]
        if engine.name == name:
            assert choose([*others, replace(engine, cached=engine.cached + 300)], avoid) == name
            assert choose([*others, replace(engine, running=engine.running // 2)], avoid) == name
