"""Docker: a container of an image that holds the agent, and a `python3` of any version for `entrypoint`.

The agent sees the image, read only, and what `--sandbox-read` names. The kernel holds it to its memory and number of processes;
CPU time is bounded for each process.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from headgate.client.sandboxes.base import (
    ENTRYPOINT,
    HOME,
    SOCKET_FOLDER,
    Contained,
    Limits,
)

_REASONS = {125: "sandbox_failed", 137: "memory_limit", 152: "cpu_limit"}
"""Docker's own failure; SIGKILL, which the kernel sends to those that take too much memory; SIGXCPU."""


class Docker:
    """`docker run IMAGE`, as `docker` is found in PATH."""

    enforces_limits = True

    def __init__(self, limits: Limits, image: str, read: Sequence[Path] = ()) -> None:
        self.limits = limits
        self._image = image
        self._read = read

    def trial(self, socket_folder: Path) -> list[str]:
        return ["docker", "image", "inspect", "--format", "{{.Id}}", self._image]

    def refusal(self, output: str) -> str:
        if shutil.which("docker") is None:
            return "--sandbox docker:IMAGE needs Docker, and there is no docker in PATH"
        return f"--sandbox docker:{self._image} cannot contain agents: {output}; is Docker running, and the image pulled?"

    def command(self, agent: Contained) -> list[str]:
        limits = self.limits
        memory = f"{limits.memory_mib}m"
        options = [
            "--rm", "--init", "--name", agent.name,
            "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes),
            "--ulimit", f"cpu={limits.cpu_s}",
            "--tmpfs", f"{HOME}:rw,exec,mode=1777,size={limits.disk_mib}m",
            *(part for path in self._read for part in _mount(path, str(path))),
            *_mount(agent.socket_folder, SOCKET_FOLDER),
            "--env", f"HOME={HOME}",
            *(part for name in agent.variables for part in ("--env", name)),
            "--entrypoint", "python3",
        ]  # fmt: skip
        return [
            "docker",
            "run",
            *options,
            self._image,
            *ENTRYPOINT,
            *agent.argv,
        ]

    def removal(self, name: str) -> list[str]:
        return ["docker", "rm", "--force", name]

    def reason(self, status: int) -> str:
        return _REASONS.get(status, "")


def _mount(source: Path, target: str) -> tuple[str, str]:
    return "--mount", f"type=bind,source={source},target={target},readonly"
