"""A Ray actor with one child process on a node.

The child ends with its actor, and the actor with the driver: `scheduler run`. Only command lines and variables of the cluster
file cross Ray's network; keys come from the environment of each node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headgate.processes.child import LocalProcess
from headgate.processes.ports import free_port
from scheduler.cluster.launch import SECRET, filled


class NodeActor:
    """One child process of a node."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    def open_folder(self, folder: str) -> str:
        """Work in the folder of `scheduler run`, so that paths mean the same. Return an error message, or ""."""
        try:
            os.chdir(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}; every node needs the folder in which `scheduler run` was started"
        return ""

    def free_port(self, host: str) -> int:
        """Return a free TCP port of this node's address, reserved until this actor ends. Raise OSError."""
        return free_port(host)

    def gpus(self) -> list[str]:
        """Return the GPUs that Ray has assigned to this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    async def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
        values: Mapping[str, str],
        trusted: bool,
    ) -> None:
        """Start the child; see `Job`. Raise OSError."""
        values = {**values, "python": sys.executable}
        hidden = {} if trusted else {key: "" for key in os.environ if key.startswith(SECRET)}
        own = hidden | {key: filled(value, values) for key, value in env.items()}
        self._process = await LocalProcess.start(
            name, [filled(part, values) for part in argv], Path(log), own
        )

    async def wait(self) -> tuple[int, str]:
        """Wait for the child's end. Return its status and its last lines."""
        assert self._process is not None
        return await self._process.wait(), self._process.tail()

    async def stop(self, grace_s: float) -> None:
        """Stop the child and all processes that it started."""
        if self._process is not None:
            await self._process.stop(grace_s)
