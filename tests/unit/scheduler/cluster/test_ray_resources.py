"""What a job reserves of a Ray node."""

from __future__ import annotations

from scheduler.cluster.ray import _resources
from scheduler.cluster.tags import Capacity


def test_a_job_that_takes_turns_keeps_no_cpu_from_a_rank_that_needs_them_all() -> None:
    assert _resources(Capacity(cpus=2.0)) == {"CPU": 2.0}
    turns = _resources(Capacity())
    assert turns, "Ray accepts no empty bundle"
    assert not turns.keys() & {"CPU", "GPU"}
