"""A version from one process to another by NCCL, and how that compares with gloo's bytes: they are the same."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headgate.weights.manifest import entry_of, plan_of
from headgate.weights.plugin.headgate_transfer.wire import Join, Receiver, Sender, TransferError

NAME = "model.safetensors"


def _receive(join: Join, device: int, found: Any) -> None:
    torch.cuda.set_device(device)
    try:
        received = Receiver(join, 1).result(120.0)
        found.put({name: tensor.float().sum().item() for name, tensor in received.tensors()})
    except TransferError as error:
        found.put(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "nccl_m2n"])
def test_the_bytes_that_nccl_brings_are_the_manifests(gpu: None, tmp_path: Path, backend: str) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("NCCL wants a GPU for each rank, and there is one")
    weights = {f"layers.{i}.weight": torch.randn(2048, 2048).bfloat16() for i in range(8)}
    save_file(weights, tmp_path / NAME)
    plan = plan_of({NAME: entry_of(tmp_path / NAME)})
    # the last device is the engine's, so that no lane of the sender is on it
    sender = Sender(
        tmp_path, plan, backend, "127.0.0.1", 1, 60.0, count - 1 if backend == "nccl_m2n" else None
    )
    join = Join(7, backend, "127.0.0.1", sender.port, 2, plan, 60.0, lanes=sender.lanes)
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    process = context.Process(target=_receive, args=(join, count - 1, found), daemon=True)
    process.start()
    sender.send()
    assert found.get(timeout=120) == {name: tensor.float().sum().item() for name, tensor in weights.items()}
    process.join(30)
