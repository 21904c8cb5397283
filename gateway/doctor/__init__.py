"""`gateway doctor`: examines what a configuration names, before or while a gateway runs on it (`checks`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about what a configuration names. With a `problem` the gateway cannot work; with a `warning` it works worse."""

    level: Literal["ok", "warning", "problem"]
    what: str
    fix: str = ""
    """The way to repair it; empty where nothing is wrong."""
