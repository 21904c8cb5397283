"""The switches by which a request may change how a model's template writes a prompt. Pure.

A template has a switch if a prompt reads differently with it; whatever else clients request has no effect, and makes no branch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

R = TypeVar("R")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_WITHOUT_THINKING = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of one prompt; None leaves one as the model's settings and template have it. False if all are None."""

    thinking: bool | None = None
    effort: str | None = None

    def __bool__(self) -> bool:
        return bool(self.variables)

    @property
    def variables(self) -> dict[str, Any]:
        """The switches that are set, by the names that templates know and records use."""
        found = {"enable_thinking": self.thinking, "reasoning_effort": self.effort}
        return {name: value for name, value in found.items() if value is not None}


NONE = Switches()


def choose_switches(effort: str | None, thinking: bool | None, known: Container[Switches]) -> Switches:
    """Return the switches that a request sets and the template has. Requests can turn thinking off, but not on against
    the settings."""
    off = False if thinking is False or effort in _WITHOUT_THINKING else None
    wanted = (Switches(off, effort), Switches(None, effort), Switches(off))
    return next((switches for switches in wanted if switches in known), NONE)


def combinations(vary: Callable[[Switches], R | None], *, thinking: bool) -> Iterator[tuple[Switches, R]]:
    """Yield every combination of switches that a template has. `thinking`: the settings leave thinking to the template.

    `vary` returns the template with some switches, or None if prompts read as they did without them.
    """
    off = Switches(thinking=False)
    single = [Switches(effort=effort) for effort in EFFORTS]
    found = {switches: made for switches in single if (made := vary(switches)) is not None}
    if thinking and (made := vary(off)) is not None:
        yield off, made
        for switches in found:
            if (both := vary(Switches(False, switches.effort))) is not None:
                yield Switches(False, switches.effort), both
    yield from found.items()
