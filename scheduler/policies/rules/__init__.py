"""The rules by name: StaleFlow's, and its competitors for comparison."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.policies.rules.base import StalenessRule as StalenessRule
from scheduler.policies.staleness import Ledger, LedgerSettings

RULES: dict[str, Callable[[LedgerSettings], StalenessRule]] = {
    "staleflow": Ledger,
}


def create(name: str, settings: LedgerSettings) -> StalenessRule:
    """The rule of that name in its first state. Raises KeyError."""
    return RULES[name](settings)
