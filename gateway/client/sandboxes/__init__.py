"""Sandboxes for agents that are commands: `gateway episodes run --sandbox bwrap`, or `--sandbox docker:IMAGE`.

`base` is the seam, `bwrap` and `docker` write the command that contains an agent. `inside` is the one program in the sandbox
that is ours: it leads a port there through a socket that `door` holds open outside, and to the gateway alone. `usage` is how
much the processes of an agent take, and `place` runs an agent and ends what took too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.client.sandboxes.base import Limits, Sandbox
from gateway.client.sandboxes.bwrap import Bubblewrap
from gateway.client.sandboxes.docker import Docker

KINDS = ("bwrap", "docker:IMAGE")


def sandbox_of(name: str, limits: Limits, read: Sequence[Path] = ()) -> Sandbox:
    """The sandbox `bwrap` or `docker:IMAGE`; `read`: folders and files that agents may read beside. Raises ValueError."""
    kind, _, image = name.partition(":")
    if missing := [str(path) for path in read if not path.exists()]:
        raise ValueError(f"there is no {missing[0]} for agents to read")
    paths = [path.absolute() for path in read]
    if name == "bwrap":
        return Bubblewrap(limits, paths)
    if kind == "docker" and image:
        return Docker(limits, image, paths)
    raise ValueError(f"a sandbox is {' or '.join(KINDS)}, not {name!r}")
