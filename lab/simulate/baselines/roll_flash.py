"""ROLL Flash: each sample is scheduled by itself, and a budget of (1 + alpha) batches may be underway.

Source: ROLL Flash (arXiv 2510.11345); alibaba/ROLL, roll/distributed/scheduler/generate_scheduler.py. Admission and order
are `lab/rules/roll.py`: batches are made of the oldest versions first, so staleness is bounded, and all wait for a
long group. Samples of a group go to engines one by one ("queue scheduling", "prompt replication"), where least is
running. At an update generation is suspended, the weights are loaded, and calls go on.

Left out: redundant environments and fine-grained parallel rewards (there are no environments here, and rewards take no
time). Knobs: alpha, its async ratio, about 2 for the most throughput (papers.md section 5; here the scenario's eta)."""

from __future__ import annotations

from lab.simulate.baselines.plain import Plain


class RollFlash(Plain):
    """A budget of groups, the oldest version first."""

    name = "roll_flash"
    rule_name = "roll"
