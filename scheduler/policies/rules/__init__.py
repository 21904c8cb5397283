"""The rules by name: StaleFlow's, and its competitors for comparison.

B is `batch`. A group's staleness is the batch it is trained in less the version it started under. *Live* groups run, or wait to
be trained. The bounds hold whatever happens.

| rule | eta is | staleness | live groups | who waits for a long group |
|---|---|---|---|---|
| staleflow | the bound | <= eta | <= (eta + 1) * (B + spare_groups) | its own batch |
| synchronous | ignored, 0 | 0 | <= B | everybody |
| one_step | ignored, 1 | <= 1 | <= 2 B | everybody, when the batch before it is trained |
| slime | update_weights_interval, >= 1 | <= eta | <= 2 B; < 3 B if groups fail | as one_step |
| roll | async_generation_ratio | <= eta | <= (eta + 1) B | every younger group |
| areal | max_staleness | not bounded | <= (eta + 1) B | nobody |
| verl | staleness_threshold, in batches | not bounded | <= (eta + 1) B | nobody |

With eta = 0, areal, verl and roll are synchronous in what may start, as long as version numbers are not skipped. The
competitors refuse `Unstick` and ignore the settings that are staleflow's own (gateway/settings.py refuses those for them). What
they have in common is in `queue.py`. A rule is a file here and a line below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from scheduler.policies.rules.areal import Areal
from scheduler.policies.rules.base import StalenessRule as StalenessRule
from scheduler.policies.rules.one_step import OneStep
from scheduler.policies.rules.roll import Roll
from scheduler.policies.rules.slime import Slime
from scheduler.policies.rules.synchronous import Synchronous
from scheduler.policies.rules.verl import Verl
from scheduler.policies.staleness import Ledger, LedgerSettings

RULES: dict[str, type[StalenessRule]] = {
    "staleflow": Ledger,
    "synchronous": Synchronous,
    "one_step": OneStep,
    "verl": Verl,
    "areal": Areal,
    "roll": Roll,
    "slime": Slime,
}


def create(name: str, settings: LedgerSettings) -> StalenessRule:
    """The rule of that name in its first state. Raises KeyError, and ValueError if the settings are not for it."""
    made: Callable[[LedgerSettings], StalenessRule] = RULES[name]
    return made(settings)


def restore(name: str, state: dict[str, Any]) -> StalenessRule:
    """The rule of that name as its `to_json` told it. Raises KeyError, and ValueError if it is no such state."""
    return RULES[name].from_json(copy.deepcopy(state))
