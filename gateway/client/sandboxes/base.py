"""The seam between a contained agent and what contains it. Pure: a sandbox writes commands, and `place` runs them.

Invariants of every sandbox: no network but the gateway, through the socket in the folder `door`; nothing of the driver's
environment but what is named; nothing that can be written but `HOME` and `/tmp`, which are empty at first, the episode's own,
bounded, and gone with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.client.sandboxes.inside import PORT

HOME = "/tmp"
"""The only folder that an agent can write to."""
DOOR = "/run/headgate"
"""The folder of the socket and of `inside`, as the agent sees it."""
URL = f"http://127.0.0.1:{PORT}"
"""The root of the gateway, as the agent sees it."""
MIB = 2**20


class SandboxUnavailable(Exception):
    """Agents cannot be contained here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one agent may take, with all its processes. Beyond it, it is killed, and its episode is left out."""

    memory_mib: int = 2048
    cpu_s: int = 600
    """Seconds of CPU time."""
    disk_mib: int = 1024
    """MiB that it may write."""
    processes: int = 256
    """Processes at the same time."""


@dataclass(frozen=True, slots=True)
class Contained:
    """An agent that is to be run."""

    name: str
    """Unique on this machine."""
    argv: Sequence[str]
    variables: Sequence[str]
    """The names of the environment variables that it is given. Their values are those of the sandbox's own process, so that
    nobody reads keys off a list of processes."""
    door: Path
    """The folder that `door` holds open."""


class Sandbox(Protocol):
    """One kind of sandbox, with its limits."""

    limits: Limits
    counts: bool
    """True if somebody else holds its processes to `limits`."""

    def trial(self, door: Path) -> list[str]:
        """A command that ends with 0 if agents can be contained here."""

    def refusal(self, said: str) -> str:
        """The error when the trial failed, with what it said."""

    def command(self, agent: Contained) -> list[str]:
        """The command that runs an agent in the sandbox, and ends with its exit status."""

    def removal(self, name: str) -> list[str]:
        """The command that ends what outlives the command's own process; empty: nothing does."""

    def reason(self, status: int) -> str:
        """A word for an exit status that is not the agent's own; empty: it is the agent's."""
