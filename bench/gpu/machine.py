"""Checks whether this machine can run the check, before anything is installed: a GPU for the CUDA builds of PyTorch and vLLM.

`python3 -m bench.gpu.machine` ends with status 1 and one paragraph if it cannot. Imports Python's own library alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_GIB = 38.0
"""Enough for the engine and the trainer of Qwen3-0.6B on one GPU, by prediction (`trainer plan-memory`); two GPUs share it."""
CAPABILITY = 8.0
"""The first with bfloat16 in its matrix units."""
DRIVER = 580
"""The first for CUDA 13, for which the pinned builds are made."""
PYTHON = (3, 11)
_QUERY = "index,uuid,name,memory.total,compute_cap,driver_version"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_RESPONSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver describes it."""

    index: int
    """The driver's number of the GPU, in the order of the PCI bus."""
    uuid: str
    name: str
    memory_gib: float
    capability: float
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of a machine that decide."""

    gpus: tuple[Gpu, ...]
    """In the order in which PyTorch counts them."""
    why_none: str
    """Empty if there are some."""
    system: str
    python: tuple[int, int]
    tools: tuple[str, ...] = ()
    """Programs and headers that Triton compiles kernels with and this machine lacks."""


def look() -> Machine:
    """Query the driver, and the interpreter that will make the environments."""
    gpus, why = _query_driver()
    return Machine(
        gpus, why, f"{platform.system()} {platform.machine()}", sys.version_info[:2], _missing_tools()
    )


def _missing_tools() -> tuple[str, ...]:
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    found = [] if any(map(shutil.which, compilers)) else ["a C compiler (gcc or clang)"]
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return (
        *found,
        *([] if headers.exists() else [f"Python's headers ({headers}; Debian has them in python3-dev)"]),
    )


def _query_driver() -> tuple[tuple[Gpu, ...], str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        response = subprocess.run(command, capture_output=True, text=True, timeout=_RESPONSE_S, check=False)
    except FileNotFoundError:
        return (), "there is no `nvidia-smi`, so no NVIDIA driver is installed"
    except subprocess.TimeoutExpired:
        return (), f"`nvidia-smi` did not respond within {_RESPONSE_S:g} s"
    if response.returncode:
        output = " ".join((response.stdout + response.stderr).split())
        return (), f"`nvidia-smi` ended with {response.returncode}: {output}"
    gpus = parse(response.stdout)
    if not gpus:
        return (), "`nvidia-smi` lists no GPU"
    shown = visible(gpus, os.environ.get(VISIBLE))
    return shown, "" if shown else f"{VISIBLE}={os.environ[VISIBLE]} hides all {len(gpus)}"


def parse(response: str) -> tuple[Gpu, ...]:
    """Read the driver's response, a line for each GPU."""
    rows = ([part.strip() for part in line.split(",")] for line in response.splitlines() if line.strip())
    return tuple(
        Gpu(int(index), uuid, name, _number(memory) / 1024, _number(capability), driver)
        for index, uuid, name, memory, capability, driver in rows
    )


def _number(text: str) -> float:
    """Return a number; 0 for what the driver does not know, as `[N/A]` for memory that GPU and host share."""
    return 0.0 if text.startswith("[") else float(text)


def visible(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` lists by number or by the first characters of a UUID.

    As in CUDA, the list ends at the first entry that names no GPU.
    """
    if setting is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        named = [
            gpu
            for gpu in gpus
            if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        ]
        if not named:
            break
        found += named[:1]
    return tuple(found)


def missing(machine: Machine) -> list[str]:
    """Return a description of each thing that the machine lacks; empty if it lacks nothing."""
    found = []
    if machine.system != "Linux x86_64":
        found.append(f"Linux on x86-64, for which the builds are pinned (this is {machine.system})")
    if machine.python < PYTHON:
        wanted, have = (".".join(map(str, version)) for version in (PYTHON, machine.python))
        found.append(f"Python {wanted} or newer (this is {have}; `make gpu-check PYTHON=...` takes another)")
    found += machine.tools
    if not machine.gpus:
        return [*found, f"an NVIDIA GPU ({machine.why_none})"]
    first = machine.gpus[0]
    if first.capability < CAPABILITY:
        found.append(
            f"a GPU of compute capability {CAPABILITY} or newer ({first.name} has {first.capability})"
        )
    if int(first.driver.partition(".")[0]) < DRIVER:
        found.append(f"a driver of version {DRIVER} or newer, for CUDA 13 (this is {first.driver})")
    if first.memory_gib < MEMORY_GIB / min(2, len(machine.gpus)):
        found.append(f"{MEMORY_GIB:g} GiB of GPU memory ({first.name} has {first.memory_gib:.0f} GiB)")
    return found


def refusal(lacks: Sequence[str]) -> str:
    """Return one paragraph for people."""
    return (
        f"gpu-check cannot run on this machine. It needs {'; and '.join(lacks)}. Nothing was installed or measured, and no"
        " report was written. `make gpu-check DRY=1` runs the same checks on the CPU in a tiny shape;"
        " docs/guide/one-gpu.md has more."
    )


def main() -> None:
    """End with status 1 if the machine cannot run the check."""
    machine = look()
    lacks = missing(machine)
    if lacks:
        sys.exit(refusal(lacks))
    print("found " + ", ".join(f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in machine.gpus), flush=True)


if __name__ == "__main__":
    main()
