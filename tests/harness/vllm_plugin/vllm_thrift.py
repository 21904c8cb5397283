"""Makes vLLM cheap on two cores; vLLM loads this as a plugin in each of its processes.

Processes sleep until a message comes: by default each looks for one in a loop for a second, which takes a core from
the gateway and the tests. The engine's core and its worker are forked: by default each imports everything again,
which is half of a start.
"""

from __future__ import annotations

from typing import Any

LOOK_MS = 5
"""How long a reader sleeps at most: a word of a new message can be lost while the reader's socket is being connected, and vLLM's
own loop would never see that message once it is over."""


def register() -> None:
    """Change the wait of every reader of messages, and how processes start."""
    from vllm import envs
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait

    def wait_without_loop(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = -1.0
        wait(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))

    SpinCondition.wait = wait_without_loop
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
