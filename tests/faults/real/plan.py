"""The plan of a crash run."""

from __future__ import annotations

from dataclasses import dataclass

from tests.harness.transports import is_served


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run."""

    seed: int = 0
    seconds: float = 900.0
    """Seconds in which faults occur."""
    every_s: float = 6.0
    """The mean time between two faults."""
    gateways: int = 2
    """1: without a cluster."""
    engines: tuple[str, ...] = ("vllm", "fake", "fake")
    transport: str = "filesystem"
    """One of `tests.harness.transports`."""
    store: str = "postgres"
    """`postgres`, or `sqlite` for a single gateway."""
    redis: bool = True
    agents: int = 50
    turns: int = 4
    tokens: int = 40
    """More than a reply has."""
    delay_s: float = 0.05
    """The fake engines' time for a token."""
    pause_s: float = 0.5
    train_share: float = 0.9
    leave_share: float = 0.08
    store_share: float = 0.15
    leak_share: float = 0.15
    group_size: int = 2
    batch: int = 8
    eta: int = 2
    train_s: float = 1.0
    lease_s: float = 3.0
    postgres_down_s: float = 6.0
    settle_s: float = 240.0
    """The longest that the system may take to settle after the last fault."""
    kinds: tuple[str, ...] = ()
    """The kinds of faults; empty: all."""
    gateway: tuple[str, ...] = ()
    """A command in place of `python -m gateway.cli`: a mutant."""
    forked: bool = False
    """Fork Python programs from one process that has imported everything, which halves their cost."""

    @property
    def present(self) -> set[str]:
        """Return the parts of the system that faults may need."""
        found = {"postgres"} if self.store == "postgres" else set()
        found |= {"redis"} if self.redis else set()
        found |= {"server"} if is_served(self.transport) else set()
        return found | ({"cluster"} if self.gateways > 1 else set())
