"""Measures how long a version takes from the trainer's folder into another process, by each way, beside gloo alone.

In one run, one after the other in each round, for files of several sizes whose pages are cached. Definitions:

- *gloo*: two processes broadcast the file's bytes in frames of 16 MiB, in a group that is there already; nothing is looked at;
- *collective*: a transfer as the trainer's server does it and engines receive it: the group is formed, every frame is sent, every
  piece's hash is compared, and both sides have said that all is well;
- *filesystem*: the process reads the same file into its memory, as an engine does that loads a folder; nothing is compared;
- *check*: what the gateway does once for a version before any engine hears of it, by either way;
- `collective_vs_gloo`: the bytes per second of the one over those of the other, at the largest size; the medians of all rounds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from safetensors.torch import load_file, save_file

from bench.report import Steps, finish, machine, number, ranged, show, spread
from gateway.weights.manifest import entry_of, plan_of
from gateway.weights.plugin.headgate_transfer.groups import Collective
from gateway.weights.plugin.headgate_transfer.wire import FRAME, Join, Receiver, Sender
from gateway.weights.tensors import scan

NAME = "model.safetensors"
_HOST = "127.0.0.1"
_LIMIT_S = 300.0
WAYS = ("gloo", "collective", "filesystem", "check")


@dataclass(slots=True)
class Size:
    """The seconds of each round, by way."""

    bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def rate(self, way: str) -> float:
        """Bytes per second."""
        return self.bytes / median(self.seconds[way])

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"bytes": self.bytes, "seconds": {way: spread(found) for way, found in self.seconds.items()}}


class Peer:
    """The other process: it does one thing after the other, and says when each is done."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def begin(self, *what: Any) -> None:
        """Tells it what to do."""
        self._pipe.send(what)

    def end(self) -> None:
        """Waits until it is done. Raises RuntimeError with what went wrong there."""
        if error := self._pipe.recv():
            raise RuntimeError(error)

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        what, *given = pipe.recv()
        try:
            _DUTIES[what](pipe, *given)
            pipe.send("")
        except Exception as error:
            pipe.send(repr(error))


def _receive_bare(pipe: Connection, port: int, size: int) -> None:
    store = dist.TCPStore(_HOST, port, None, is_master=False)
    group = Collective("gloo", store, 1, 2, _HOST, _LIMIT_S)
    data = torch.empty(size, dtype=torch.uint8)
    pipe.send("")
    _broadcast(group, data, receives=True)
    group.agree(content=True)


def _receive(_pipe: Connection, join: Join) -> None:
    Receiver(join, 1).result(_LIMIT_S)


def _read(_pipe: Connection, file: Path) -> None:
    for tensor in load_file(file).values():
        tensor.clone()


_DUTIES: dict[str, Any] = {"gloo": _receive_bare, "collective": _receive, "filesystem": _read}


def _broadcast(group: Collective, data: torch.Tensor, *, receives: bool) -> None:
    frames = (("broadcast", data[start : start + FRAME]) for start in range(0, len(data), FRAME))
    for _ in group.broadcast(frames, receives=receives):
        pass


def time_gloo(peer: Peer, size: int) -> float:
    """The seconds of the bytes alone."""
    store = dist.TCPStore(_HOST, 0, None, is_master=True, wait_for_workers=False)
    peer.begin("gloo", store.port, size)
    group, data = Collective("gloo", store, 0, 2, _HOST, _LIMIT_S), torch.ones(size, dtype=torch.uint8)
    peer.end()
    began = time.monotonic()
    _broadcast(group, data, receives=False)
    group.agree(content=True)
    took = time.monotonic() - began
    peer.end()
    group.close()
    return took


def time_collective(peer: Peer, file: Path, plan: dict[str, list[tuple[int, str]]]) -> float:
    """The seconds of a whole transfer."""
    began = time.monotonic()
    sender = Sender(file.parent, plan, "gloo", _HOST, 1, _LIMIT_S)
    peer.begin("collective", Join(1, "gloo", _HOST, sender.port, 2, plan, _LIMIT_S))
    sender.send()
    peer.end()
    return time.monotonic() - began


def time_filesystem(peer: Peer, file: Path) -> float:
    """The seconds until the other process has the file in its memory."""
    began = time.monotonic()
    peer.begin("filesystem", file)
    peer.end()
    return time.monotonic() - began


def time_check(file: Path) -> float:
    """The seconds of the gateway's own look at a file."""
    began = time.monotonic()
    scan(file)
    return time.monotonic() - began


def write(file: Path, mebibytes: int) -> None:
    """A checkpoint of random bfloat16 numbers: layers of 2 MiB matrices."""
    bits = np.random.default_rng(0).integers(0, 2**14, (mebibytes // 2, 1024, 1024), dtype=np.uint16)
    tensors = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    save_file({f"layers.{i}.weight": tensor.contiguous() for i, tensor in enumerate(tensors)}, file)


def measure(peer: Peer, folder: Path, mebibytes: int, rounds: int, steps: Steps) -> Size:
    """All ways in turn, in each round; one round before them is not counted."""
    file = folder / NAME
    write(file, mebibytes)
    plan = plan_of({NAME: entry_of(file)})
    found = Size(file.stat().st_size)
    for number_ in range(rounds + 1):
        steps.begin(f"{mebibytes} MiB, " + (f"round {number_} of {rounds}" if number_ else "warm-up"))
        took = {
            "gloo": time_gloo(peer, found.bytes),
            "collective": time_collective(peer, file, plan),
            "filesystem": time_filesystem(peer, file),
            "check": time_check(file),
        }
        if number_:
            for way, seconds in took.items():
                found.seconds[way].append(seconds)
    return found


def main(
    mib: Annotated[list[int] | None, typer.Option(help="Sizes in MiB. [default: 64 and 512]")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds that count.")] = 7,
    out: Annotated[Path, typer.Option(help="The file of the report.")] = Path("runs/bench-publish.json"),
) -> None:
    """Time a version from the trainer's folder into another process."""
    torch.set_num_threads(1)
    sizes = mib or [64, 512]
    steps = Steps(len(sizes) * (rounds + 1))
    peer, before = Peer(), machine()
    try:
        with steps, tempfile.TemporaryDirectory() as folder:
            found = [measure(peer, Path(folder), size, rounds, steps) for size in sizes]
    finally:
        peer.close()
    rows = [
        [
            f"{size.bytes / 2**20:.0f} MiB, {way}",
            ranged(spread(size.seconds[way])),
            number(size.rate(way) / 1e6),
        ]
        for size in found
        for way in WAYS
    ]
    show("From the trainer's folder into another process", ["", "seconds", "MB/s"], rows)
    largest = max(found, key=lambda size: size.bytes)
    report = {
        "bench": "publish",
        "machine": before,
        "rounds": rounds,
        "collective_vs_gloo": largest.rate("collective") / largest.rate("gloo"),
        "collective_vs_filesystem": largest.rate("collective") / largest.rate("filesystem"),
        "sizes": [size.to_json() for size in found],
    }
    finish(report, out)


if __name__ == "__main__":
    typer.run(main)
