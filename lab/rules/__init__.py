"""Staleness rules of other systems, which the simulator compares with StaleFlow's: a file for each, and a line in `RULES`.

B is `batch`. A group's staleness is the batch it is trained in less the version it started under. *Live* groups run, or wait to
be trained. The bounds always hold.

| rule | eta is | staleness | live groups | who waits for a long group |
|---|---|---|---|---|
| staleflow | the bound | <= eta | <= (eta + 1) * (B + spare_groups) | its own batch |
| synchronous | ignored, 0 | 0 | <= B | all groups |
| one_step | ignored, 1 | <= 1 | <= 2 B | all groups, once the batch before it is trained |
| roll | async_generation_ratio | <= eta | <= (eta + 1) B | every younger group |
| areal | max_staleness | not bounded | <= (eta + 1) B | no group |
| verl | staleness_threshold, in batches | not bounded | <= (eta + 1) B | no group |

With eta = 0, areal, verl and roll are synchronous in what may start, as long as version numbers are not skipped. The
competitors refuse `Unstick` and ignore the settings that are staleflow's own. What they have in common is in `queue.py`.
"""

from __future__ import annotations

import pkgutil

from scheduler.policies.staleness_base import StalenessRule
from scheduler.policies.staleness_state import LedgerSettings

RULES = {
    "staleflow": "scheduler.policies.staleflow:StaleFlow",
    "synchronous": "lab.rules.synchronous:Synchronous",
    "one_step": "lab.rules.one_step:OneStep",
    "verl": "lab.rules.verl:Verl",
    "areal": "lab.rules.areal:Areal",
    "roll": "lab.rules.roll:Roll",
}
"""The module and class of each rule."""


def create(name: str, settings: LedgerSettings) -> StalenessRule:
    """Return the rule of that name in its first state. Raise KeyError."""
    rule: StalenessRule = pkgutil.resolve_name(RULES[name])(settings)
    return rule
