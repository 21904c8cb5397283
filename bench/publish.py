"""Measures how long a version takes from a step into engines by each transport; compares the collective one with gloo alone.

First models of stated shapes with some engines (`bench.transports` defines what is counted, `bench.versions` what a step
changes). The keys of the report are of the largest: `seconds_to_first_engine`, `seconds_to_last_engine`, `trainer_blocked_share`
(of the seconds to the last engine), `bytes_per_step` and `pause_s_p99` by transport and number of engines, `delta_share` the
bytes of a delta over those of the version. `transfer_costs` are the same of the collective way with one engine, in seconds a
byte, as a simulator's scenario has them. Two engines of 0.6B take 7 GB of memory: each has a version and receives another.

Then files of several sizes whose pages are cached, one after the other in each round:

- *gloo*: two processes broadcast the file's bytes in frames of 16 MiB, in an existing group; nothing is compared;
- *collective*: a transfer as the trainer's server does it and engines receive it: the group is formed, every frame is sent, every
  piece's hash is compared, and both sides have confirmed it;
- *filesystem*: the process reads the same file into its memory, as an engine does that loads a folder; nothing is compared;
- *check*: what the gateway does once for a version before any engine receives it, by either transport;
- `collective_vs_gloo`: the bytes per second of the one over those of the other, at the largest size; the medians of all rounds.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
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

from bench.holders import Holder
from bench.report import Steps, finish, machine, number, ranged, show, spread
from bench.transports import TRANSPORTS, Times, World, publish
from bench.versions import NAME, NOISE, SHAPES, Shape, adapter_of, next_states
from bench.versions import write as write_version
from headgate.weights.manifest import entry_of, plan_of
from headgate.weights.plugin.headgate_transfer.groups import Collective
from headgate.weights.plugin.headgate_transfer.wire import (
    FRAME,
    Join,
    Receiver,
    Sender,
)
from headgate.weights.tensors import scan

_LR = 1e-6
_MOST = 2
"""Engines that hold more than a billion bytes each."""
_HOST = "127.0.0.1"
_LIMIT_S = 300.0
WAYS = ("gloo", "collective", "filesystem", "check")


@dataclass(slots=True)
class Size:
    """The seconds of each round, by way."""

    bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def rate(self, way: str) -> float:
        """Return bytes per second."""
        return self.bytes / median(self.seconds[way])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"bytes": self.bytes, "seconds": {way: spread(found) for way, found in self.seconds.items()}}


class Peer:
    """The other process: it executes commands one after the other, and reports the end of each."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def begin(self, *what: Any) -> None:
        """Start a command."""
        self._pipe.send(what)

    def end(self) -> None:
        """Wait until the command ends. Raise RuntimeError with the other process's error."""
        if error := self._pipe.recv():
            raise RuntimeError(error)

    def close(self) -> None:
        """End the process."""
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
    """Return the seconds of the bytes alone."""
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
    """Return the seconds of a whole transfer."""
    began = time.monotonic()
    sender = Sender(file.parent, plan, "gloo", _HOST, 1, _LIMIT_S)
    peer.begin("collective", Join(1, "gloo", _HOST, sender.port, 2, plan, _LIMIT_S))
    sender.send()
    peer.end()
    return time.monotonic() - began


def time_filesystem(peer: Peer, file: Path) -> float:
    """Return the seconds until the other process has the file in its memory."""
    began = time.monotonic()
    peer.begin("filesystem", file)
    peer.end()
    return time.monotonic() - began


def time_check(file: Path) -> float:
    """Return the seconds of the gateway's own look at a file."""
    began = time.monotonic()
    scan(file)
    return time.monotonic() - began


def write(file: Path, mebibytes: int) -> None:
    """Write a checkpoint of random bfloat16 numbers: layers of 2 MiB matrices."""
    bits = np.random.default_rng(0).integers(0, 2**14, (mebibytes // 2, 1024, 1024), dtype=np.uint16)
    tensors = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    save_file({f"layers.{i}.weight": tensor.contiguous() for i, tensor in enumerate(tensors)}, file)


def measure(peer: Peer, folder: Path, mebibytes: int, rounds: int, steps: Steps) -> Size:
    """Measure all ways in turn, in each round, after one round that is not counted."""
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


@dataclass(slots=True)
class Model:
    """The measurements of one shape."""

    name: str
    bytes: int
    changed: float
    """The share of the elements that a step changed in bfloat16."""
    times: dict[str, dict[int, list[Times]]] = field(default_factory=dict)
    """The measurements by transport and number of engines."""

    def mean(self, transport: str, engines: int, value: Callable[[Times], float]) -> float:
        """Return the median over the rounds."""
        return median(value(found) for found in self.times[transport][engines])

    def table(self, value: Callable[[Times], float]) -> dict[str, dict[str, float]]:
        """Return a figure by transport and number of engines."""
        return {way: {str(n): self.mean(way, n, value) for n in found} for way, found in self.times.items()}

    @property
    def delta_share(self) -> float | None:
        """The bytes of a delta over those of the version, for one engine."""
        if "delta" not in self.times:
            return None
        return self.mean("delta", min(self.times["delta"]), lambda t: t.bytes) / self.bytes

    def costs(self, transport: str = "collective") -> dict[str, float] | None:
        """Return the seconds a byte of each part, with the fewest engines."""
        if transport not in self.times:
            return None
        count = min(self.times[transport])
        parts: dict[str, Callable[[Times], float]] = {
            "copy": lambda t: t.blocked,
            "write": lambda t: t.written - t.blocked,
            "check": lambda t: t.checked - t.written,
            "send": lambda t: (t.last - t.checked - max(t.pauses)) / count,
            "swap": lambda t: max(t.pauses),
        }
        return {name: self.mean(transport, count, part) / self.bytes for name, part in parts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "model": self.name,
            "bytes": self.bytes,
            "changed_share": self.changed,
            "delta_share": self.delta_share,
            "seconds_to_first_engine": self.table(lambda t: t.first),
            "seconds_to_last_engine": self.table(lambda t: t.last),
            "trainer_blocked_share": self.table(lambda t: t.blocked / t.last),
            "bytes_per_step": self.table(lambda t: t.bytes),
            "pause_s_p99": self.table(lambda t: max(t.pauses)),
            "transfer_costs": self.costs(),
        }


def measure_model(
    shape: Shape, folder: Path, counts: list[int], transports: list[str], rounds: int, steps: Steps
) -> Model:
    """Measure every transport with each number of engines, in each round."""
    steps.begin(f"{shape.name}: random weights, and a step of lr {_LR:g}")
    before, after = next_states(shape, _LR, NOISE)
    changed = sum(int((before[key] != after[key]).sum()) for key in before)
    total = sum(tensor.numel() for tensor in before.values())
    root = folder / shape.name / "versions"
    size = (write_version(root, 1, before) / NAME).stat().st_size
    del before
    counts = [n for n in counts if size < 1e9 or n <= _MOST]
    found = Model(shape.name, size, changed / total, {way: {n: [] for n in counts} for way in transports})
    engines = [Holder() for _ in range(max(counts))]
    try:
        for engine in engines:
            engine.call("bring_folder", root / "v000001")
            engine.call("swap")
        adapter = adapter_of(shape)
        for number_ in range(rounds):
            for count in counts:
                for way in transports:
                    steps.log(f"{shape.name}, {way}, {count} engines, round {number_ + 1}")
                    world = World(root, after, adapter, engines[:count])
                    found.times[way][count].append(publish(way, world))
    finally:
        for engine in engines:
            engine.close()
        shutil.rmtree(root.parent)
    return found


def _show_model(model: Model) -> None:
    rows = [
        [
            way,
            str(count),
            number(model.mean(way, count, lambda t: t.first)),
            number(model.mean(way, count, lambda t: t.last)),
            number(100 * model.mean(way, count, lambda t: t.blocked / t.last)),
            number(model.mean(way, count, lambda t: t.bytes) / 1e6),
            number(model.mean(way, count, lambda t: max(t.pauses))),
        ]
        for way, counts in model.times.items()
        for count in counts
    ]
    head = ["", "engines", "first, s", "last, s", "blocked, %", "MB", "pause, s"]
    note = f"{model.bytes / 1e6:.0f} MB; a step of lr {_LR:g} changes {100 * model.changed:.2f} % of the elements"
    show(f"{model.name}: from a step into engines", head, rows, note)


def main(
    models: Annotated[str, typer.Option(help=f"Shapes: {', '.join(SHAPES)}.")] = "demo,0.3b,0.6b",
    engines: Annotated[
        str, typer.Option(help=f"Numbers of engines; of more than a billion bytes at most {_MOST}.")
    ] = "1,2,4",
    transports: Annotated[str, typer.Option(help="Ways into the engines.")] = ",".join(TRANSPORTS),
    model_rounds: Annotated[int, typer.Option(min=1, help="Rounds of the models.")] = 1,
    mib: Annotated[list[int] | None, typer.Option(help="Sizes in MiB. [default: 64 and 512]")] = None,
    rounds: Annotated[
        int, typer.Option(min=0, max=100, help="Rounds of the sizes that count; 0: leave them out.")
    ] = 7,
    out: Annotated[Path, typer.Option(help="The file of the report.")] = Path("runs/bench-publish.json"),
) -> None:
    """Time a version from a step into engines by every transport, and compare the collective transport with gloo alone.

    Example: python -m bench.publish --models demo --engines 1,2 --rounds 0
    """
    torch.set_num_threads(1)
    sizes = (mib or [64, 512]) if rounds else []
    shapes, counts, ways = models.split(","), [int(n) for n in engines.split(",")], transports.split(",")
    if unknown := (set(shapes) - SHAPES.keys()) | (set(ways) - set(TRANSPORTS)):
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}")
    before = machine()
    with Steps(len(shapes) + len(sizes) * (rounds + 1)) as steps, tempfile.TemporaryDirectory() as folder:
        measured = [
            measure_model(SHAPES[name], Path(folder), counts, ways, model_rounds, steps) for name in shapes
        ]
        found = _measure_sizes(Path(folder), sizes, rounds, steps)
    for model in measured:
        _show_model(model)
    _show_sizes(found)
    largest = max(measured, key=lambda model: model.bytes).to_json()
    report = {
        "bench": "publish",
        "command": " ".join(["python -m bench.publish", *sys.argv[1:]]),
        "machine": {**before, "load_average_after": machine()["load_average"]},
        "rounds": rounds,
        **{key: value for key, value in largest.items() if key not in ("model", "bytes")},
        "models": [model.to_json() for model in measured],
        **_against_gloo(found),
        "sizes": [size.to_json() for size in found],
    }
    finish(report, out)


def _measure_sizes(folder: Path, sizes: list[int], rounds: int, steps: Steps) -> list[Size]:
    if not sizes:
        return []
    peer = Peer()
    try:
        return [measure(peer, folder, size, rounds, steps) for size in sizes]
    finally:
        peer.close()


def _show_sizes(found: list[Size]) -> None:
    rows = [
        [
            f"{size.bytes / 2**20:.0f} MiB, {way}",
            ranged(spread(size.seconds[way])),
            number(size.rate(way) / 1e6),
        ]
        for size in found
        for way in WAYS
    ]
    if rows:
        show("From the trainer's folder into another process", ["", "seconds", "MB/s"], rows)


def _against_gloo(found: list[Size]) -> dict[str, float]:
    if not found:
        return {}
    largest = max(found, key=lambda size: size.bytes)
    return {
        "collective_vs_gloo": largest.rate("collective") / largest.rate("gloo"),
        "collective_vs_filesystem": largest.rate("collective") / largest.rate("filesystem"),
    }


if __name__ == "__main__":
    typer.run(main)
