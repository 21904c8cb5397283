"""The ways in which the proofs publish versions to engines: the settings of each, and the trainer's server that it needs.

Folders are written by the proofs. What differs is the manifest's format, a delta or an adapter in the folder, who serves it, and
what the gateway is offered: a path or a URL.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.weights import delta
from tests.harness.programs import module
from tests.harness.weights import write_manifest, write_manifest_of_pieces

TRANSPORTS = ("filesystem", "http", "collective", "lora", "delta")
_ENGINE = {"collective": "collective", "lora": "lora"}


@dataclass(frozen=True, slots=True)
class Way:
    """The settings of a gateway and its trainer for a transport."""

    transport: str = "filesystem"
    url: str = ""
    """The trainer's server, where there is one."""
    engine: dict[str, Any] = field(default_factory=dict)
    """For the table `[engine]`."""
    weights: dict[str, Any] = field(default_factory=dict)
    """The table `[weights]`."""

    def place(self, path: Path) -> dict[str, str]:
        """Return the place of a version, as it is offered."""
        return {"url": self.url} if self.transport in ("http", "delta") else {"path": str(path)}


def way_of(transport: str, work: Path, url: str) -> Way:
    """Return the settings of a transport. `url`: the trainer's server; `work`: where a gateway keeps its copies."""
    kind = _ENGINE.get(transport)
    engine = {"transport": kind} if kind else {}
    weights = {"sources": [url], "dir": str(work / "copies")} if is_served(transport) else {}
    return Way(transport, url, engine, weights)


def is_served(transport: str) -> bool:
    """Return True if the trainer has a server."""
    return transport in ("http", "collective", "delta")


def server_argv(transport: str, versions: Path) -> list[str]:
    """Return the module and arguments of the trainer's server of versions, as `trainer run` starts it, but for the port."""
    if transport == "collective":
        return ["trainer.publish.sender", "--dir", str(versions), "--engine-facing-host", "127.0.0.1"]
    return ["gateway.cli", "mirror", "--dir", str(versions)]


@asynccontextmanager
async def served(transport: str, versions: Path, work: Path) -> AsyncIterator[Way]:
    """Yield a transport, with its server for as long as it is used."""
    versions.mkdir(parents=True, exist_ok=True)
    if not is_served(transport):
        yield way_of(transport, work, "")
        return
    server = module(*server_argv(transport, versions), alive="/versions")
    try:
        await server.start()
        yield way_of(transport, work, server.url)
    finally:
        server.kill()


def finish(transport: str, folder: Path, parent: Path, version: int, parent_version: int, probe: Any) -> None:
    """Add to a folder that has its tensors what the transport needs in addition: a delta, and the manifest."""
    if transport == "delta" and not delta.write(folder / delta.NAME, parent, folder):
        print(f"version {version} has no delta", file=sys.stderr)
    write = write_manifest if transport == "filesystem" else write_manifest_of_pieces
    write(folder, version, parent_version, probe)
