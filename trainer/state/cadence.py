"""When a checkpoint is due. Pure."""

from __future__ import annotations

from typing import Literal

Every = int | Literal["auto"]
SHARE = 0.05
"""The part of a run's time that saving takes at most with "auto", were nothing else done meanwhile."""
MOST = 100
"""Steps after which a checkpoint is due with "auto" even so: a start never trains more of them again."""


def is_due(every: Every, steps: int, since: int, since_s: float, save_s: float | None) -> bool:
    """Return whether a checkpoint is due after step `steps` of the run.

    `since`, `since_s`: the steps and seconds since the newest was begun; `save_s`: the seconds that one takes, None if none was
    measured, which makes the first step measure it.
    """
    if every != "auto":
        return steps % every == 0
    return save_s is None or since >= MOST or save_s <= SHARE * since_s
