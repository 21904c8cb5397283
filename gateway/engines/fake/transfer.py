"""The fake engine's receipt of weights by collective operations: real bytes over real gloo, as vLLM's plugin has them.

The fault `hold_receive` is a barrier: the transfer stands before the frame of that number; `received_frames` counts those begun.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gateway.engines.fake.blocks import Block

if TYPE_CHECKING:
    from headgate.weights.plugin.headgate_transfer.wire import Receiver

_PLUGIN = "headgate.weights.plugin.headgate_transfer"


class Transfer:
    """One fake worker's side."""

    def __init__(self) -> None:
        self.received_frames = 0
        self.active = False
        """True between vLLM's start and end of an update."""
        self.hold_before: int | None = None
        self._moved = threading.Condition()
        self._receiver: Receiver | None = None

    def hold(self, before: int | None) -> None:
        """Move the barrier; None takes it away."""
        with self._moved:
            self.hold_before = before
            self._moved.notify_all()

    async def device(self) -> Any:
        """Return the accelerator and shared memory of this process; needs torch."""
        return (await _imported("devices")).own()

    async def receive(self, join: dict[str, Any]) -> None:
        """Begin to receive a version; needs torch."""
        wire = await _imported("wire")
        if self._receiver is not None:
            self._receiver.abandon()
        place = wire.Join(**join)
        self.received_frames = 0
        self._receiver = wire.Receiver(place, place.rank_offset, self._on_frame)

    async def received(self, version: int, timeout_s: float) -> tuple[str, Block | None]:
        """Return the identity of the version that came, and its block. Raise RuntimeError if it did not come whole."""
        receiver, self._receiver = self._receiver, None
        if receiver is None or receiver.version != version:
            raise RuntimeError(f"version {version} was not sent to this engine")
        received = await asyncio.to_thread(receiver.result, timeout_s)
        data = received.files["model.safetensors"].whole().numpy().data
        return hashlib.sha256(data).hexdigest()[:16], Block.of_header(bytes(data))

    def _on_frame(self, number: int) -> None:
        with self._moved:
            self.received_frames = number + 1
            while self.hold_before is not None and number >= self.hold_before:
                self._moved.wait()


async def _imported(name: str) -> Any:
    """Import a part of the plugin, and torch with it: that takes seconds, in which an engine goes on."""
    return await asyncio.to_thread(import_module, f"{_PLUGIN}.{name}")
