"""Collects the decisions of one reactor's reactions at one tag, and sends one value per port."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.program.events import Do, Gone
from scheduler.reactor import Context, Output


@dataclass(slots=True)
class Outbox:
    """Empty between tags."""

    commands: list[Do] = field(default_factory=list)
    gone: list[Gone] = field(default_factory=list)

    def send(self, now: Context, commands: Output[tuple[Do, ...]], gone: Output[tuple[Gone, ...]]) -> None:
        """Set the ports that have something to say."""
        if self.commands:
            why = "; ".join(f"{do.engine}: {do.reason}" for do in self.commands)
            now.set(commands, tuple(self.commands), why=why)
        if self.gone:
            now.set(gone, tuple(self.gone), why="; ".join(f"{g.engine} is gone" for g in self.gone))
        self.commands, self.gone = [], []
