"""The checks, in the order in which they run: what is worth most comes first, if the time ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["trainer", "engine"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: a process with a time limit of its own."""

    name: str
    part: Part
    limit_s: float
    module: str
    """The module of `bench.gpu.checks` that has `measure(Place) -> Figures`."""


CHECKS = (
    Check("machine", "trainer", 60.0, "hardware"),
    Check("attention", "trainer", 120.0, "attention"),
    Check("parity", "trainer", 90.0, "parity"),
    Check("proof", "trainer", 120.0, "proof"),
    Check("alone", "trainer", 180.0, "alone"),
    Check("adapters", "trainer", 150.0, "adapters"),
    Check("long-rows", "trainer", 90.0, "long_rows"),
    Check("precision", "trainer", 60.0, "precision"),
    Check("offload", "trainer", 60.0, "offload"),
    Check("publication", "trainer", 90.0, "publication"),
    Check("transfer", "trainer", 90.0, "transfer"),
    Check("ranks", "trainer", 120.0, "ranks"),
    Check("compiled", "trainer", 600.0, "compiled"),
    Check("update", "engine", 900.0, "update"),
    Check("sleep", "engine", 600.0, "sleep"),
    Check("handover", "engine", 600.0, "handover"),
    Check("training", "engine", 900.0, "training"),
)
BY_NAME = {check.name: check for check in CHECKS}
