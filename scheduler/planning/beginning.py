"""What was the case when a run went on in a new file of its recording, which lacks the events that reported it."""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.program import ControlProgram
from scheduler.reactor.reading import Run
from scheduler.reactor.snapshot import restore


def beginning(run: Run) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the events, each with its model, that report the state in the run's header, if it has one. Raise BadState."""
    if run.header.state is None:
        return []
    program = ControlProgram(run.header.settings)
    restore(program, run.header.state)
    return [
        (model, {"type": type(fact).__name__, **msgspec.to_builtins(fact)}) for model, fact in program.facts()
    ]
