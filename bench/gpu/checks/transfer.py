"""A version from one process to another by each backend that this machine has: the same bytes, and GB/s.

`shown` is memory of this process, on its device, that the other opens (`[publish] transport = "ipc"`).
NCCL needs a GPU for each rank, so with one GPU it is left out.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.checks.place import Figures, Place, require
from headgate.weights.manifest import entry_of, plan_of, write_manifest
from headgate.weights.plugin.headgate_transfer import devices
from headgate.weights.plugin.headgate_transfer.wire import Join, Receiver, Sender, TransferError
from trainer.publish.shown import ShownVersion, listing_for

_FILE = "model.safetensors"
_WAIT_S = 60.0
_JOB = 7


def measure(place: Place) -> Figures:
    """Return, by backend, seconds and GB/s; `nccl` has the reason if it was left out."""
    size, layers = (64, 4) if place.dry else (4096, 32)
    weights = {f"layers.{i}.weight": torch.randn(size, size).bfloat16() for i in range(layers)}
    save_file(weights, place.folder / _FILE)
    expected = {name: tensor.float().sum().item() for name, tensor in weights.items()}
    gb = sum(tensor.nbytes for tensor in weights.values()) / 1e9
    count = 0 if place.dry else torch.cuda.device_count()
    figures: Figures = {"gb": gb}
    if count < 2:
        figures["nccl"] = {"skipped": f"NCCL needs two GPUs, and there are {count}"}
    for backend in ("gloo", "ipc", *(("nccl", "nccl_m2n") if count > 1 else ())):
        seconds, found = _sent(place.folder, backend, count)
        figures[backend] = {"s": seconds, "gb_s": gb / seconds}
        require(
            found == expected, f"{backend}: {found if isinstance(found, str) else 'other bytes'}", figures
        )
    shown = ShownVersion(place.folder.parent, place.device)
    moved = {name: tensor.to(place.device) for name, tensor in weights.items()}
    began = time.perf_counter()
    shown.fill(moved)
    figures["shown"] = {"fill_s": time.perf_counter() - began}
    write_manifest(place.folder, _JOB, None, None)
    shown.show(place.folder)
    seconds, found = _sent(
        place.folder, "ipc", 1 - place.dry, listing_for(place.folder, "ipc", [devices.own()])
    )
    shown.close()
    figures["shown"] |= {"opened_and_hashed_s": seconds, "gb_s": gb / seconds}
    return require(found == expected, f"shown: {found if isinstance(found, str) else 'other bytes'}", figures)


def _sent(folder: Path, backend: str, gpus: int, shown: str | None = None) -> tuple[float, Any]:
    """Return the seconds of a transfer, without the start of the receiver, and what was received."""
    plan = plan_of({_FILE: entry_of(folder / _FILE)})
    # The last device is the engine's, so that no lane of the sender is on it.
    last = gpus - 1 if backend == "nccl_m2n" else None
    sender = Sender(folder, plan, backend, "127.0.0.1", 1, _WAIT_S, last, shown=shown)
    place = _JOB, backend, "127.0.0.1", sender.port, 2, plan, _WAIT_S
    join = Join(*place, lanes=sender.lanes, shown=shown is not None)
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    process = context.Process(target=_receive, args=(join, gpus - 1, found), daemon=True)
    process.start()
    found.get(timeout=_WAIT_S)  # its imports are done
    began = time.perf_counter()
    sender.send()
    seconds = time.perf_counter() - began
    received = found.get(timeout=_WAIT_S)
    process.join(_WAIT_S)
    return seconds, received


def _receive(join: Join, device: int, found: Any) -> None:
    if device >= 0:
        torch.cuda.set_device(device)
    found.put("ready")
    try:
        received = Receiver(join, 1).result(_WAIT_S)
        found.put({name: tensor.float().sum().item() for name, tensor in received.tensors()})
    except TransferError as error:
        found.put(str(error))
