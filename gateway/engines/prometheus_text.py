"""Reads a few samples from an engine's /metrics, in Prometheus' text form.

Such a page has a hundred kilobytes of histograms and is read once a second, so only lines that begin with a wanted name are
parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\b"


def samples(page: str, names: Iterable[str]) -> dict[str, list[float]]:
    """Return the values of each name, one for each set of labels; a name that is not there has none."""
    found: dict[str, list[float]] = {}
    page = f"\n{page}"
    for name in names:
        found[name] = values = []
        sample = re.compile(rf"\n{re.escape(name)}(?:\{{[^\n]*\}})? {_NUMBER}")
        at = page.find(begin := f"\n{name}")
        while at >= 0:
            if match := sample.match(page, at):
                values.append(float(match[1]))
            at = page.find(begin, at + 1)
    return found


def label(page: str, name: str, key: str) -> str | None:
    """Return a label's value in the first sample of a name; None: it is not there."""
    match = re.search(rf'^{re.escape(name)}\{{[^\n]*?\b{re.escape(key)}="([^"\n]*)"', page, re.MULTILINE)
    return match[1] if match else None
