"""Coefficients, baselines and the grid of scenarios are those that were settled before headgate's own policy was tuned."""

from __future__ import annotations

import pytest

from scheduler.simulate import frozen

FROZEN = "c7a33b61e2dd02686a8462fed69cef0ef4f30bbe9563600557bf70f3246256f2"
"""Changed since the freeze: never. A change is written down here, with its reason and what it did to the figures."""


def test_nothing_changed_since_the_freeze() -> None:
    assert frozen.digest() == FROZEN


def test_the_digest_tells_any_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.suffix for path in frozen.files()} == {".toml", ".py"}
    fewer = frozen.files()[:-1]
    monkeypatch.setattr(frozen, "files", lambda: fewer)
    assert frozen.digest() != FROZEN
