"""Misbehavior of the fake engine: what `set_faults` sets, and weights that break the engine that loads them.

Such weights are a directory with a `faults.json`, such as `{"loading": "fails"}`.
`fails`: an error; `hangs`: the process does nothing any more, as if it were stopped; `dies`: it is killed, as if out of memory.
The latter two affect the whole process, so they are for engines in processes of their own.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class Faults:
    """The engine's misbehavior; the defaults are none."""

    delay_s: float = 0.0
    slots: int = 0
    """Requests that are sampled concurrently; the rest wait in the engine's queue. 0: any number."""
    lag_s: float = 0.0
    drop_after: int = 0
    stale_reload: bool = False
    stall: bool = False
    hold_after: int | None = None
    """Requests stop when they have sampled this many tokens. None: none does."""
    load_s: float = 0.0
    hold_load: bool = False
    hold_receive: int | None = None
    """Transfers stand before the frame of this number. None: none does."""
    fail_load: bool = False
    fail_after: int = 0
    logprob_noise: float = 0.0
    endless: bool = False
    sick: bool = False
    sleep_mode: bool = False
    sleep_s: float = 0.0
    wake_s: float = 0.0
    fail_sleep: bool = False
    fail_wake: bool = False


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
