"""Reads a few samples from an engine's /metrics, in Prometheus' text form.

Such a page has a hundred kilobytes of histograms and is read once a second, so only lines that begin with a wanted name are
parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\b"


def samples(page: str, names: Iterable[str]) -> dict[str, list[float]]:
    """The values of each name, one for each set of labels; a name that is not there has none."""
    found: dict[str, list[float]] = {}
    for name in names:
        found[name] = values = []
        labels = r"(?:\{[^\n]*\})?"
        for match in re.finditer(rf"^{re.escape(name)}{labels} {_NUMBER}", page, re.MULTILINE):
            values.append(float(match[1]))
    return found


def label(page: str, name: str, key: str) -> str | None:
    """A label's value in the first sample of a name; None: it is not there."""
    match = re.search(rf'^{re.escape(name)}\{{[^\n]*?\b{re.escape(key)}="([^"\n]*)"', page, re.MULTILINE)
    return match[1] if match else None
