"""Ancestry of versions after a trainer went back to an older checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policies.lineage import ancestors, orphans

Parents = dict[int, int | None]

STRAIGHT: Parents = {0: None, 1: 0, 2: 1, 3: 2}
BRANCHED: Parents = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4}
"""After 3 the trainer went back to 1."""
TWICE: Parents = {**BRANCHED, 6: 4, 7: 6, 8: 0}
"""After 5 back to 4, after 7 back to the beginning."""
UNKNOWN: Parents = {0: None, 1: None, 2: None, 5: None}
"""Parents that are not named: the version before."""
LOST: Parents = {3: 2, 5: 3}
"""Versions before 3 are not known any more."""


@pytest.mark.parametrize(
    ("parents", "version", "theirs", "lost"),
    [
        (STRAIGHT, 3, {0, 1, 2, 3}, set()),
        (STRAIGHT, 0, {0}, set()),
        (BRANCHED, 3, {0, 1, 2, 3}, set()),
        (BRANCHED, 4, {0, 1, 4}, {2, 3}),
        (BRANCHED, 5, {0, 1, 4, 5}, {2, 3}),
        (TWICE, 7, {0, 1, 4, 6, 7}, {2, 3, 5}),
        (TWICE, 8, {0, 8}, {1, 2, 3, 4, 5, 6, 7}),
        (UNKNOWN, 5, {0, 1, 2, 5}, set()),
        (LOST, 5, {2, 3, 5}, set()),
        ({}, 0, {0}, set()),
        ({7: 7}, 7, {7}, set()),
    ],
)
def test_examples(parents: Parents, version: int, theirs: set[int], lost: set[int]) -> None:
    assert ancestors(parents, version) == theirs
    assert orphans(parents, version) == lost


HISTORIES = st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=1, max_size=12).map(
    lambda drawn: {v: None if not v or p is None else p % v for v, p in enumerate(drawn)}
)
"""Each version's parent is an earlier one, or is not known."""


@settings(deadline=None)
@given(HISTORIES)
def test_every_version_is_an_ancestor_or_an_orphan(parents: Parents) -> None:
    newest = max(parents)
    assert ancestors(parents, newest) | orphans(parents, newest) == set(parents)
    assert not ancestors(parents, newest) & orphans(parents, newest)


@settings(deadline=None)
@given(HISTORIES, st.data())
def test_ancestors_of_an_ancestor_are_ancestors(parents: Parents, data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(sorted(parents)))
    named = parents[version]
    parent = named if named is not None else max(version - 1, 0)
    assert ancestors(parents, version) == ancestors(parents, parent) | {version}
    assert min(ancestors(parents, version)) == 0


@settings(deadline=None)
@given(HISTORIES)
def test_the_order_in_which_versions_are_named_does_not_matter(parents: Parents) -> None:
    assert orphans(dict(reversed(parents.items())), max(parents)) == orphans(parents, max(parents))
