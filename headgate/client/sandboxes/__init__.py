"""Sandboxes for agents that are commands: `gateway episodes run --sandbox bwrap`, or `--sandbox docker:IMAGE`.

`base` has the interface; `bwrap` and `docker` make the command that contains an agent. `entrypoint` is headgate's only program in
the sandbox: it forwards a port to the socket of `gateway_socket`, which reaches the gateway alone. `usage` measures what the
processes of an agent use, and `runner` runs an agent and kills one that exceeds its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headgate.client.sandboxes.base import Limits, Sandbox
from headgate.client.sandboxes.bwrap import Bubblewrap
from headgate.client.sandboxes.docker import Docker

KINDS = ("bwrap", "docker:IMAGE")


def sandbox_of(name: str, limits: Limits, read: Sequence[Path] = ()) -> Sandbox:
    """Return the sandbox `bwrap` or `docker:IMAGE`; `read`: more folders and files that agents may read. Raise ValueError."""
    kind, _, image = name.partition(":")
    if missing := [str(path) for path in read if not path.exists()]:
        raise ValueError(f"there is no {missing[0]} for agents to read")
    paths = [path.absolute() for path in read]
    if name == "bwrap":
        return Bubblewrap(limits, paths)
    if kind == "docker" and image:
        return Docker(limits, image, paths)
    raise ValueError(f"a sandbox is {' or '.join(KINDS)}, not {name!r}")
