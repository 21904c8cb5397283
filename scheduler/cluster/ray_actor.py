"""A Ray actor that holds one child process on a node.

The child dies with its actor, and the actor with the driver: `scheduler run`. What comes over Ray's network is a command line and
variables that the cluster file has; keys are the node's own (its environment has them, from wherever it was started).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes.child import LocalProcess
from processes.ports import free_port
from scheduler.cluster.launch import SECRET, filled


class NodeActor:
    """One child process of a node."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None

    def open_folder(self, folder: str) -> str:
        """Works where `scheduler run` does, so that paths mean the same; answers what is wrong with that."""
        try:
            os.chdir(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}; every node needs the folder in which `scheduler run` was started"
        return ""

    def free_port(self, host: str) -> int:
        """A free TCP port of this node's address; it is held for the child until this actor ends. Raises OSError."""
        return free_port(host)

    def gpus(self) -> list[str]:
        """The GPUs that Ray has assigned to this actor, as the driver numbers them."""
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
        """Starts the child; see `Job`. Raises OSError."""
        values = {**values, "python": sys.executable}
        hidden = {} if trusted else {key: "" for key in os.environ if key.startswith(SECRET)}
        own = hidden | {key: filled(value, values) for key, value in env.items()}
        self._process = await LocalProcess.start(
            name, [filled(part, values) for part in argv], Path(log), own
        )

    async def wait(self) -> tuple[int, str]:
        """Waits until the child ends; returns its status and its last lines."""
        assert self._process is not None
        return await self._process.wait(), self._process.tail()

    async def stop(self, grace_s: float) -> None:
        """Ends the child and whatever it started."""
        if self._process is not None:
            await self._process.stop(grace_s)
