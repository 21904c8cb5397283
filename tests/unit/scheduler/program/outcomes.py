"""Results of engines' steps, and settings, for property tests."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from scheduler.program.events import Step
from tests.unit.scheduler.program.world import Outcome

SETTINGS = st.tuples(
    st.fixed_dictionaries({"max_restarts": st.integers(0, 2), "backoff_s": st.sampled_from([1, 3])}),
    st.fixed_dictionaries(
        {"mode": st.sampled_from(["abort", "keep"]), "order": st.sampled_from(["rolling", "pull"])}
    ),
)


OUTCOME = st.builds(
    Outcome,
    ok=st.sampled_from([True, True, True, False]),
    after_s=st.sampled_from([1, 1, 0, 2, 3, 4, 6, 8, None]),
    pinned=st.sampled_from([0, 0, 2]),
    stubborn=st.booleans(),
    excused=st.booleans(),
)


OUTCOMES = st.dictionaries(
    st.sampled_from(get_args(Step)), st.lists(OUTCOME, min_size=1, max_size=4), max_size=6
)
"""The fate of a step that is begun for the first time, the second, ...; afterwards, and for other steps: done in 1 s."""
