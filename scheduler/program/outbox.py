"""Collects the decisions of one reactor's reactions at one tag, and sends one value per port."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.program.events import EngineUnavailable, StepCommand
from scheduler.reactor import Context, Output


@dataclass(slots=True)
class Outbox:
    """Empty between tags."""

    commands: list[StepCommand] = field(default_factory=list)
    unavailable: list[EngineUnavailable] = field(default_factory=list)

    def send(
        self,
        now: Context,
        commands: Output[tuple[StepCommand, ...]],
        unavailable: Output[tuple[EngineUnavailable, ...]],
    ) -> None:
        """Set the ports that have values."""
        if self.commands:
            why = "; ".join(f"{command.engine}: {command.reason}" for command in self.commands)
            now.set(commands, tuple(self.commands), why=why)
        if self.unavailable:
            now.set(
                unavailable,
                tuple(self.unavailable),
                why="; ".join(f"{engine.engine} is unavailable" for engine in self.unavailable),
            )
        self.commands, self.unavailable = [], []
