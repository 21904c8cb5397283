"""The ancestors of the newest version: a trainer that goes back to an older checkpoint orphans what came after it."""

from __future__ import annotations

from collections.abc import Mapping


def ancestors(parents: Mapping[int, int | None], version: int) -> frozenset[int]:
    """Return `version` and every version that it was trained from.

    `parents` has each version's parent; if that is unknown (None), the version before counts as the parent.
    """
    found = {version}
    while True:
        parent = parents.get(version)
        if parent is None:
            parent = max((v for v in parents if v < version), default=None)
        if parent is None or parent >= version:
            return frozenset(found)
        found.add(parent)
        version = parent


def orphans(parents: Mapping[int, int | None], newest: int) -> frozenset[int]:
    """Return the versions that `newest` does not descend from."""
    return frozenset(v for v in parents if v < newest) - ancestors(parents, newest)
