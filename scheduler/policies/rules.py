"""The staleness rules by name: StaleFlow's, and those that exist to be compared with it (`scheduler/comparison`).

A rule for comparison is loaded when the settings name it, and only then: nothing here depends on one.
"""

from __future__ import annotations

import pkgutil

from scheduler.policies.staleness_base import StalenessRule as StalenessRule
from scheduler.policies.staleness_state import LedgerSettings

RULES = {
    "staleflow": "scheduler.policies.staleflow:StaleFlow",
    "synchronous": "scheduler.comparison.synchronous:Synchronous",
    "one_step": "scheduler.comparison.one_step:OneStep",
    "verl": "scheduler.comparison.verl:Verl",
    "areal": "scheduler.comparison.areal:Areal",
    "roll": "scheduler.comparison.roll:Roll",
    "slime": "scheduler.comparison.slime:Slime",
}
"""The module and class of each rule."""


def create(name: str, settings: LedgerSettings) -> StalenessRule:
    """The rule of that name in its first state. Raises KeyError, and ValueError if the settings are not for it."""
    rule: StalenessRule = pkgutil.resolve_name(RULES[name])(settings)
    return rule
