"""The interface of sandboxes. Pure: a sandbox makes commands, and `runner` runs them.

Invariants of every sandbox: no network but the gateway, through the socket in `socket_folder`; nothing of the driver's
environment but what is named; nothing that can be written but `HOME` and `/tmp`, which are empty at first, the episode's own,
bounded, and gone with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headgate.client.sandboxes.entrypoint import PORT

HOME = "/tmp"
"""The only folder that an agent can write to."""
SOCKET_FOLDER = "/run/headgate"
"""The folder of the socket and of `entrypoint`, as the agent sees it."""
ENTRYPOINT = (f"{SOCKET_FOLDER}/entrypoint.py", f"{SOCKET_FOLDER}/gateway.sock")
"""The beginning of the command of an agent, after its Python."""
URL = f"http://127.0.0.1:{PORT}"
"""The root of the gateway, as the agent sees it."""
MIB = 2**20


class SandboxUnavailable(Exception):
    """Agents cannot be contained here; the message has the cause and the fix."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one agent may use, with all its processes. One that uses more is killed, and its episode is left out."""

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
    """The names of the environment variables that it gets. Their values are those of the sandbox's own process, so that no
    list of processes shows keys."""
    socket_folder: Path
    """The folder of the socket to the gateway (`gateway_socket`)."""


class Sandbox(Protocol):
    """One kind of sandbox, with its limits."""

    limits: Limits
    enforces_limits: bool
    """True if the sandbox itself enforces `limits`."""

    def trial(self, socket_folder: Path) -> list[str]:
        """Return a command that ends with 0 if agents can be contained here."""

    def refusal(self, output: str) -> str:
        """Return the error of a failed trial, with its output."""

    def command(self, agent: Contained) -> list[str]:
        """Return the command that runs an agent in the sandbox, and ends with its exit status."""

    def removal(self, name: str) -> list[str]:
        """Return the command that ends what outlives the command's own process; empty: nothing does."""

    def reason(self, status: int) -> str:
        """Return the reason for an exit status that is not the agent's own; empty: it is the agent's."""
