"""A version that vLLM opens in this process's memory, after it forgot its own weights (level 2) where it can sleep.

The reference is the same version loaded from its folder: the scores have to be equal. Reported are the seconds of each part, and
the bytes that the engine's processes read in that time, which have to be far fewer than the version's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.gpu.checks.place import Figures, Place, require
from gateway.config import EngineSettings, ModelSettings
from gateway.engines.process import EngineProcess
from headgate.processes.reading import bytes_read
from headgate.weights.manifest import MANIFEST, plan_of, write_manifest
from headgate.weights.plugin.headgate_transfer.devices import Device, uuid
from headgate.weights.plugin.headgate_transfer.wire import Join, Sender
from trainer.publish.shown import ShownVersion, listing_for

_VERSION = 1
_WAIT_S = 120.0
_FILE = "model.safetensors"
_IDS = list(range(1, 33))


def measure(place: Place) -> Figures:
    """Return seconds and bytes for the host's memory (`host`), and for the engine's GPU (`gpu`), if this process has it."""
    return asyncio.run(_measure(place))


async def _measure(place: Place) -> Figures:
    model, folder = place.model(), place.folder / "v000001"
    tensors = _changed(load_file(model / _FILE))
    folder.mkdir()
    for file in (file for file in model.iterdir() if file.name != _FILE):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    write_manifest(folder, _VERSION, 0, None)
    settings = EngineSettings.model_validate({**place.engine, "transport": "collective"})
    served = ModelSettings.model_validate({"path": str(model), "max_model_len": place.workload.context})
    process = await EngineProcess.start("taker", settings, served, "policy", str(model))
    figures: Figures = {"gb": (folder / _FILE).stat().st_size / 1e9}
    try:
        base = await process.engine.score(_IDS)
        await _load(process, folder)
        expected = await process.engine.score(_IDS)
        require(expected != base, "the version computes as its parent does", figures)
        workers = await process.engine.devices()
        for name, device in _memories(workers):
            await _load(process, model)
            figures[name] = await _taken(process, folder, device, tensors, workers)
            same = await process.engine.score(_IDS) == expected
            require(same, f"{name}: the engine computes otherwise than with the file", figures)
            few = figures[name]["read_gb"] < figures["gb"] / 2
            require(few or place.dry, f"{name}: the engine read {figures[name]['read_gb']:.2f} GB", figures)
    finally:
        await process.stop()
    return figures


def _changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return other weights: the same but for one norm."""
    name = next(name for name in tensors if name.endswith("input_layernorm.weight"))
    return tensors | {name: tensors[name] * 2}


def _memories(workers: Sequence[Device]) -> Iterator[tuple[str, str]]:
    for index in range(torch.cuda.device_count()):
        if all(worker["gpu"] == uuid(index) for worker in workers):
            yield "gpu", f"cuda:{index}"
    yield "host", "cpu"


async def _load(process: EngineProcess, folder: Path) -> None:
    await process.engine.pause()
    await process.engine.load(str(folder))
    await process.engine.resume()


async def _taken(
    process: EngineProcess, folder: Path, device: str, tensors: dict[str, Tensor], workers: Sequence[Device]
) -> Figures:
    """Show the version, and have the engine take it; wipe its own weights before, if it can sleep."""
    engine, shown = process.engine, ShownVersion(folder.parent, device)
    figures: Figures = {"slept": await engine.frees_memory()}
    await engine.pause()
    if figures["slept"]:
        await engine.sleep(2)
        await engine.wake()
    read = bytes_read(process.process.pid) or 0
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    began = time.perf_counter()
    shown.fill(moved)
    figures["fill_s"] = time.perf_counter() - began
    try:
        shown.show(folder)
        plan = plan_of(json.loads((folder / MANIFEST).read_bytes())["files"])
        listing = listing_for(folder, "ipc", workers)
        require(listing is not None, f"the engine, which has {workers}, cannot open {device}", figures)
        sender = Sender(folder, plan, "ipc", "127.0.0.1", len(workers), _WAIT_S, shown=listing)
        join = Join(_VERSION, "ipc", "127.0.0.1", sender.port, len(workers) + 1, plan, _WAIT_S, shown=True)
        began = time.perf_counter()
        await asyncio.gather(engine.receive(asdict(join)), asyncio.to_thread(sender.send))
        figures["opened_and_hashed_s"] = time.perf_counter() - began
        began = time.perf_counter()
        await engine.receive_weights(_VERSION, _WAIT_S)
        figures["put_in_place_s"] = time.perf_counter() - began
        await engine.resume()
    finally:
        shown.close()
    return figures | {"read_gb": ((bytes_read(process.process.pid) or 0) - read) / 1e9}
