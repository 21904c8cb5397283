"""The closed form compared with a loop over tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate.engine import Call, Engine, EngineCosts
from scheduler.policies.throughput import EngineModel
from tests.unit.lab.simulate.slow import Job, finished

MODEL = EngineModel(s_per_kv_token=1e-5, s_per_batch=6e-3, s_per_call=2e-3, s_per_step=3e-3)


def run(costs: EngineCosts, jobs: list[Job]) -> tuple[dict[int, float], Engine]:
    """The end time of each job, computed by events alone."""
    engine, ends, arrivals = Engine(costs), {}, sorted(jobs, key=lambda job: job.time)
    while arrivals or engine.load:
        due = engine.next_event()
        if arrivals and (due is None or arrivals[0].time < due):
            job = arrivals.pop(0)
            engine.add(job.time, Call(job.number, job.prompt, job.want))
            continue
        assert due is not None
        for call in engine.settle(due):
            assert call.done == call.want
            ends[call.owner] = due
    return ends, engine


jobs = st.lists(
    st.tuples(st.floats(0.0013, 3.0), st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(jobs, st.sampled_from([1200, 2500, 10**6]), st.sampled_from([2, 5, 64]))
def test_the_closed_form_ends_calls_when_a_loop_over_tokens_does(
    given_jobs: list[tuple[float, int, int]], capacity: int, slots: int
) -> None:
    costs = EngineCosts(MODEL, prefill_s=1.7e-4, capacity=capacity, slots=slots)
    fast, engine = run(costs, [Job(i, *job) for i, job in enumerate(given_jobs)])
    slow = finished(costs, [Job(i, *job) for i, job in enumerate(given_jobs)])
    assert fast == pytest.approx(slow, rel=1e-9, abs=1e-9)
    assert engine.kv == 0
    assert engine.running == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 300)), min_size=1, max_size=8),
    st.floats(0.001, 5.0),
)
def test_what_is_taken_out_has_the_tokens_of_the_steps_that_have_begun(
    sizes: list[tuple[int, int]], at: float
) -> None:
    engine = Engine(EngineCosts(MODEL, prefill_s=0.0, capacity=10**6, slots=64))
    calls = [Call(i, prompt, want + 1000) for i, (prompt, want) in enumerate(sizes)]
    for call in calls:
        engine.add(0.0, call)
    assert engine.drain(at) == calls
    now, steps, kv = 0.0, 0, sum(prompt for prompt, _ in sizes)
    while now < at:
        now += (
            MODEL.s_per_kv_token * kv
            + max(MODEL.s_per_batch, MODEL.s_per_call * len(calls))
            + MODEL.s_per_step
        )
        kv, steps = kv + len(calls), steps + 1
    assert {call.done for call in calls} == {steps}
    assert engine.at == pytest.approx(now)


def test_a_full_cache_sends_the_youngest_back_and_no_token_is_sampled_twice() -> None:
    costs = EngineCosts(MODEL, prefill_s=1e-4, capacity=1500, slots=8)
    jobs = [Job(i, 0.01 * i, 100, 700) for i in range(4)]
    ends, engine = run(costs, jobs)
    assert list(ends) == sorted(ends)
    assert engine.prefilled > 4 * 100


def test_a_cached_prompt_is_not_prefilled() -> None:
    engine = Engine(EngineCosts(MODEL, prefill_s=1.0, capacity=10**6, slots=8))
    engine.add(0.0, Call("a", prompt=100, want=10, cached=90))
    assert engine.at == pytest.approx(10.0)


def test_events_do_not_grow_with_tokens() -> None:
    engine = Engine(EngineCosts(MODEL, prefill_s=0.0, capacity=10**9, slots=8))
    engine.add(0.0, Call("a", prompt=1, want=1_000_000))
    engine.add(0.0, Call("b", prompt=1, want=1_000_000))
    events = list(itertools.takewhile(lambda due: due is not None, iter(lambda: _settle(engine), None)))
    assert len(events) == 1


def _settle(engine: Engine) -> float | None:
    due = engine.next_event()
    if due is not None:
        engine.settle(due)
    return due


def test_what_ends_with_the_step_underway_ends_before_the_next_call_is_prefilled() -> None:
    costs = EngineCosts(MODEL, prefill_s=1.0, capacity=10**6, slots=8)
    job, late = Job(0, 0.001, 1, 10), Job(1, 1.001 + 9.5 * MODEL.step_s(1, 5), 50, 5)
    ends, _ = run(costs, [job, late])
    assert ends == pytest.approx(finished(costs, [Job(0, 0.001, 1, 10), Job(1, late.time, 50, 5)]))
    assert ends[0] < 1.2
