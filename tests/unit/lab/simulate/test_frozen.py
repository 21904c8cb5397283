"""Coefficients, baselines and the grid of scenarios are those that were settled before headgate's own policy was tuned."""

from __future__ import annotations

import pytest

from lab.simulate import frozen

FROZEN = "bdd856238c0dc206a0c005b52beec841be655f617fec94a90f18ee2093c26ba1"
"""Changed since the freeze; a change is written down here, with its reason and what it did to the figures:

1. `baselines/plain.py` has three hooks more (`on_left`, `on_opened`, `on_asleep`), with empty bodies: headgate's own policy needs
   these events. No figure changed, to the bit (`test_world.py` holds what the baselines did before).
2. The rules for comparison moved to `lab/rules`: an import in `baselines/verl_async.py` and two names of files in
   docstrings follow. No figure changed, to the bit.
3. `policies/staleness.py` is `policies/staleflow.py` now: two imports and a name in a docstring follow. No figure changed.
4. A rule's `consumed` is `next_batch` now: one attribute in `baselines/seamlessflow.py` follows. No figure changed, to the bit.
5. `Policy` moved to `world.py`, whose events call it, and `Host`, `Sample` and `Layout` to `entities.py`: imports in six files
   and a docstring of `baselines/plain.py` follow. No figure changed, to the bit.
6. Docstrings of `baselines/one_step.py`, `plain.py` and `staleflow.py` begin with their subject. No code changed.

Frozen again, before the work on lending that waits for stragglers:

7. Windows of the grid are at least 4 (eta + 1) batches, `batches` alone changed in `scenarios/*.toml`: every figure did.
8. `baselines/verl_async.py` and `seamlessflow.py` take the scenario's `threshold`, where it has one: no figure changed, to the
   bit. `baselines/staleflow.py` has other triggers of a pull, and its weights travel to the engines' hosts before they can be
   pulled, as headgate's do (0.6 s for 7B, and the way between sites): its figures changed, no other baseline's did.
9. A docstring of `baselines/staleflow.py` begins with its subject. No code changed.

Frozen again, before any of headgate's policies was compared with them:

10. `baselines/dora.py` and `heddle.py` are new. What their abstracts leave open was chosen for them on the four scenarios of
    lab/notes/simulation.md that are not in the grid, with seed 31. No figure of another policy changed.
11. `Foresight.expect` returns the tokens alone: a line of `baselines/heddle.py` follows. No figure changed, to the bit.
12. The rules for comparison are created by `lab.rules`, and the simulator is `lab.simulate`: imports follow. No code changed.
"""


def test_nothing_changed_since_the_freeze() -> None:
    assert frozen.digest() == FROZEN


def test_the_digest_changes_with_any_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.suffix for path in frozen.files()} == {".toml", ".py"}
    fewer = frozen.files()[:-1]
    monkeypatch.setattr(frozen, "files", lambda: fewer)
    assert frozen.digest() != FROZEN
