"""JSON from outside or from a model, nested no deeper than everything that reads it later can follow.

Python's own decoder, templates and writers of JSON each give up at another depth, with errors of their own; a bound that is far
below all of them, checked where JSON comes in, leaves one error. The standard library alone: grading workers start with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_NESTED = (dict, list)
MAX_DEPTH = 100
"""The deepest nesting of objects and arrays in a body, and in the text of a tool call's arguments."""
MAX_SAMPLED_DEPTH = 90
"""The depth allowed in a tool call that a model samples: its client can send it back inside a body."""


class TooDeep(ValueError):
    """JSON is nested deeper than is read here."""


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Raise TooDeep if objects and arrays are nested deeper than `most`."""
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTED)
        ]
        if not level:
            return
    raise TooDeep(f"it is nested more than {most} deep")


def too_deep(text: str, most: int = MAX_DEPTH) -> bool:
    """Return whether a text is JSON nested deeper than `most`, or begins so deep a nesting that Python's reader gives up."""
    if text.count("{") + text.count("[") <= most:
        return False
    try:
        loads(text, most)
    except TooDeep:
        return True
    except ValueError:
        return False
    return False


def finite(text: str) -> float:
    """Return the number that a text is. Raise ValueError for one that no float can hold."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def loads(
    text: str | bytes, most: int = MAX_DEPTH, *, parse_float: Callable[[str], Any] | None = None
) -> Any:
    """Read JSON as `json.loads` does. Raise ValueError; where it is nested too deep, TooDeep."""
    return _read(json.JSONDecoder(parse_float=parse_float), text, most)


def loads_strictly(
    text: str | bytes, most: int = MAX_DEPTH, *, parse_float: Callable[[str], Any] = finite
) -> Any:
    """Read JSON as `loads` does. Raise ValueError too for NaN, Infinity and numbers that become one of them."""
    return _read(json.JSONDecoder(parse_float=parse_float, parse_constant=refuse_constant), text, most)


def _read(decoder: json.JSONDecoder, text: str | bytes, most: int) -> Any:
    try:
        value = decoder.decode(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except RecursionError as error:
        raise TooDeep(f"it is nested more than {most} deep") from error
    check_depth(value, most)
    return value
