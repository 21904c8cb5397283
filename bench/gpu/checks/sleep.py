"""An engine that sleeps at both levels and wakes: seconds of each, and the GiB of the GPU that it keeps while it sleeps."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable
from typing import Any

from bench.gpu.checks.place import Figures, Place, require
from bench.gpu.machine import VISIBLE
from gateway.config import EngineSettings, ModelSettings
from gateway.engines.base import Engine, Level
from gateway.engines.process import EngineProcess

_LEVELS: tuple[Level, ...] = (1, 2)
_KEPT_GIB = 8.0
"""More than this kept in sleep leaves no room for a trainer."""


def measure(place: Place) -> Figures:
    """Return, by level, the seconds to sleep and to wake with weights loaded, and the GiB that are in use while it sleeps."""
    if place.engine.get("launch") != "vllm":
        return {"skipped": "an engine that vLLM does not run"}
    return asyncio.run(_measure(place))


async def _measure(place: Place) -> Figures:
    model = place.model()
    settings = EngineSettings.model_validate(place.engine)
    served = ModelSettings.model_validate({"path": str(model), "max_model_len": place.workload.context})
    process = await EngineProcess.start("sleeper", settings, served, "policy", str(model))
    try:
        if not await process.engine.frees_memory():
            return {"skipped": "vLLM has no sleep mode here"}
        gpu = settings.env[VISIBLE]
        figures: Figures = {"awake_gib": _used_gib(gpu)}
        ids = list(range(1, 33))
        before = await process.engine.score(ids)
        for level in _LEVELS:
            figures[f"level{level}"] = await _cycle(process.engine, level, str(model), gpu)
        gap = max(abs(a - b) for a, b in zip(before, await process.engine.score(ids), strict=True))
        figures["gap_after"] = gap
    finally:
        await process.stop()
    kept = max(figures[f"level{level}"]["asleep_gib"] for level in _LEVELS)
    require(gap == 0.0, "the engine computes otherwise after it slept", figures)
    return require(kept < _KEPT_GIB, f"{kept:.1f} GiB stay in use while it sleeps", figures)


async def _cycle(engine: Engine, level: Level, model: str, gpu: str) -> dict[str, Any]:
    await engine.pause()
    asleep_s = await _seconds(engine.sleep(level))
    used = _used_gib(gpu)
    wake_s = await _seconds(engine.wake()) + await _seconds(engine.load(model))
    await engine.resume()
    return {"sleep_s": asleep_s, "wake_s": wake_s, "asleep_gib": used}


async def _seconds(act: Awaitable[None]) -> float:
    began = time.perf_counter()
    await act
    return time.perf_counter() - began


def _used_gib(gpu: str) -> float:
    """Return the GiB in use on the engine's GPU, by the driver."""
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(output.splitlines()[0]) / 1024
