"""Weights that break the engine that loads them: a directory with an `faults.json`, such as `{"loading": "fails"}`.

`fails`: an error; `hangs`: the process does nothing any more, as if it were stopped; `dies`: it is killed, as if out of memory.
The latter two affect the whole process, so they are for engines in processes of their own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import orjson


def catch(weights: str) -> None:
    """Fall ill of a checkpoint directory, unless it is sound."""
    file = Path(weights) / "faults.json"
    if not file.exists():
        return
    match orjson.loads(file.read_bytes())["loading"]:
        case "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise RuntimeError("these weights cannot be loaded (fault)")
