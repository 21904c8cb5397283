"""Numbers that state how well an episode went. It imports the standard library alone: grading workers start with it."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def number(value: Any) -> float:
    """Return a finite number that an agent or a grader stated, as a float. Raise ValueError.

    Scalars of NumPy and PyTorch are numbers. Truth values and text are not, even where Python would turn them into numbers:
    `true` states that something happened, not how well.
    """
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise ValueError(f"a reward is a number, not {_short_repr(plain)}")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"a reward is a finite number, not {_short_repr(plain)}")
    return found


def _plain(value: Any) -> Any:
    """Return the number in a scalar of an array library; anything else as it is. Raise ValueError for several numbers."""
    if not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except Exception as error:  # an array of several values; each library raises its own error
        raise ValueError(f"a reward is one number, not {_short_repr(value)}") from error


def _short_repr(value: Any) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"
