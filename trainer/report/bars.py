"""Figures as characters: a sparkline of the reward, and a bar for each phase of a step."""

from __future__ import annotations

from collections.abc import Mapping

_HEIGHTS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
SPARK = 60
"""Points of a sparkline."""
BAR = 32
"""Characters of the longest bar."""
_LEAST = 0.005
"""The share of a step below which a phase has no bar."""
_OVER_ALL = ("total", "idle", "compute", "onload", "offload")
"""Times that are no phases: sums over them, and parts of others."""


def sparkline(values: list[float], width: int = SPARK) -> str:
    """The last `width` values as bars between their least and greatest."""
    values = values[-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(_HEIGHTS[round((value - low) * scale)] for value in values)


def phases(record: Mapping[str, float]) -> list[tuple[str, str]]:
    """The phases of a step that took a share of it that can be seen, in their order, each with its bar and its seconds."""
    total = record.get("seconds/total", 0.0)
    found = {
        name.removeprefix("seconds/"): value for name, value in record.items() if name.startswith("seconds/")
    }
    seen = {name: value for name, value in found.items() if name not in _OVER_ALL and value > _LEAST * total}
    return [
        (name, f"{_bar(value / max(seen.values()))} {value:8.2f} s  {value / total:4.0%}")
        for name, value in seen.items()
    ]


def _bar(share: float) -> str:
    whole, rest = divmod(round(share * BAR * 8), 8)
    return ("█" * whole + _EIGHTHS[rest] * (rest > 0)).ljust(BAR)
