"""vLLM's weight-transfer engine `headgate`: `--weight-transfer-config '{"backend": "headgate"}'`.

The routes are vLLM's. `init_weight_transfer_engine` begins to receive a version while sampling; `update_weights` puts what
came, whole and with the manifest's hashes, in the place of the engine's weights. Before that nothing of the engine is touched, so
a transfer that fails leaves it as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from .wire import Join, Received, Receiver, TransferError

NAME = "headgate"


@dataclass
class UpdateInfo:
    """Which version is to be put in place, and how long it may still be on its way."""

    version: int
    timeout_s: float


class CollectiveEngine(WeightTransferEngine):
    """One worker's side."""

    init_info_cls = Join
    update_info_cls = UpdateInfo
    _receiver: Receiver | None = None
    taken: Received | None = None
    """The version that was put in place last, until it is compared with the memory (`vllm_worker`)."""

    def init_transfer_engine(self, init_info: Join) -> None:
        """Begin to receive in a thread, and discard what was received before."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self._receiver = Receiver(init_info, rank)

    def start_weight_update(self) -> None:
        """Nothing: the weights change in `update_weights`, where vLLM forgets an update that failed."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Wait for the version, and load it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raise TransferError, without a change, if the version was not received."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        receiver, self._receiver = self._receiver, None
        if receiver is None or receiver.version != update_info.version:
            raise TransferError(f"version {update_info.version} was not sent to this engine")
        received = receiver.result(update_info.timeout_s)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(received.tensors())
        finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what was read may change from here on, where it is the trainer's own memory
        self.taken = received

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Receive no more."""
        if self._receiver is not None:
            self._receiver.abandon()
            self._receiver = None
        self.taken = None


def register() -> None:
    """Is called by vLLM in each of its processes, more than once in some."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, CollectiveEngine)
