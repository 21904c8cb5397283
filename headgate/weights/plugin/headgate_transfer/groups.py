"""The ways in which the bytes of a transfer travel from a sender to an engine's workers, all behind one interface.

| backend | how | needs |
|---|---|---|
| gloo | TCP, from host memory to host memory | nothing |
| nccl | NCCL, by way of a buffer on the accelerator at both ends | an accelerator at both ends, and not the same one |
| nccl_m2n | NCCL, one lane for each accelerator of the trainer's machine, each with a share of the frames | as nccl |
| ipc | the memory that the trainer shows (`handles`); else a ring in shared memory: a copy in, a copy out | GPU or `/dev/shm` |

Invariants: every operation has a deadline, and its error names the step; a group that is closed ends what its other ranks wait
for, at the latest by their own deadlines; what this installation cannot do is refused by name before any rank waits (`refusal`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from . import devices
from .devices import SHARED, Device
from .handles import Image
from .shared import AT_ONCE, Frames, Ring, Shown
from .steps import TransferError, named

T = TypeVar("T")
BACKENDS = ("gloo", "nccl", "nccl_m2n", "ipc")
_LARGEST = 2**24
"""The bytes of a usual frame."""
_LOOK_S = 0.0005


class TransferGroup(Protocol):
    """The ranks of one lane; rank 0 sends. Close it: what others still wait for then ends with an error there."""

    memory: Mapping[str, Image] | None
    """A receiver's: the files, where they are there already, so that `broadcast` moves nothing; else None."""

    def broadcast(self, frames: Frames, *, receives: bool) -> Iterator[torch.Tensor]:
        """Send bytes to all other ranks, or receive into them; yield each once it has arrived.

        A few are on their way concurrently, so that no rank waits for its turn.
        """
        ...

    def agree(self, content: bool) -> bool:
        """Return true if every rank is content."""
        ...

    def close(self) -> None:
        """End every connection."""
        ...


def refusal(backend: str, workers: Sequence[Device] = ()) -> str:
    """Return why this process cannot take part in a transfer by a backend; empty if it can.

    `workers`: the devices of those that receive, where this process sends and they are known.
    """
    if backend not in BACKENDS:
        return f"backend {backend!r} is none of {', '.join(BACKENDS)}"
    if backend.startswith("nccl"):
        if not dist.is_nccl_available():
            return f"backend {backend!r} needs NCCL, and PyTorch {torch.__version__} here is built without it"
        if not torch.cuda.is_available():
            return f"backend {backend!r} needs an accelerator, and PyTorch sees none here"
        if gpu := devices.in_common(lanes_of(backend), workers):
            return (
                f"backend {backend!r} needs different GPUs at both ends, and the trainer's server and the engine both have"
                f" {gpu}: set [weights] backend = 'auto'"
            )
    if backend == "ipc" and not os.access(SHARED, os.W_OK):
        return f"backend 'ipc' needs {SHARED}, which this process cannot write"
    return ""


def chosen(backend: str, workers: Sequence[Device] = ()) -> str:
    """Return the way for `auto`, by the devices of the sender and of `workers`; any other name as it is.

    NCCL only if it is known that no accelerator is at both ends. Where one is, shared memory if it is known to be the same and
    has room: else gloo, which alone notices immediately that a peer has died.
    """
    if backend != "auto":
        return backend
    if not workers or not all(worker["gpu"] for worker in workers) or refusal("nccl"):
        return "gloo"
    count = torch.cuda.device_count()
    ways = ["nccl_m2n", "nccl"] if count > 1 else ["nccl"]
    memory = devices.shared_memory()
    if devices.in_common(count, workers) and all(worker["memory"] == memory for worker in workers):
        ways += ["ipc"] if devices.room() >= AT_ONCE * _LARGEST else []
    return next((way for way in ways if not refusal(way, workers)), "gloo")


def lanes_of(backend: str) -> int:
    """How many lanes a sender opens."""
    return torch.cuda.device_count() if backend == "nccl_m2n" else 1


def accelerator(lane: int | None = None) -> torch.device:
    """Return the sender's device for a lane; a worker's, of the calling thread, without one."""
    return torch.device("cuda", torch.cuda.current_device() if lane is None else lane)


class Lanes:
    """The groups of one transfer, each of the sender and all workers."""

    def __init__(self, open_: Callable[[int], TransferGroup], count: int) -> None:
        """Wait until all ranks have joined. `open_` forms the group of a lane."""
        self._groups: list[TransferGroup] = []
        try:
            for lane in range(count):
                self._groups.append(open_(lane))
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[[TransferGroup, int], T]) -> list[T]:
        """Run `work` on every lane in parallel and return its results. The first that fails ends all, and its error is raised."""
        errors: list[BaseException] = []

        def one(lane: int) -> T | None:
            try:
                return work(self._groups[lane], lane)
            except BaseException as error:
                errors.append(error)
                self.close()
                return None

        with ThreadPoolExecutor(len(self._groups), "weights-lane") as pool:
            found = list(pool.map(one, range(len(self._groups))))
        if errors:
            raise errors[0]
        return [value for value in found if value is not None]

    @property
    def memory(self) -> Mapping[str, Image] | None:
        """The files, where the groups have nothing to receive."""
        return self._groups[0].memory

    def agree(self, content: bool) -> bool:
        """Return true if every rank is content."""
        return self._groups[0].agree(content)

    def close(self) -> None:
        """End every connection."""
        for group in self._groups:
            with suppress(RuntimeError, OSError):
                group.close()


def open_group(
    backend: str,
    store: Any,
    rank: int,
    size: int,
    host: str,
    timeout_s: float,
    device: torch.device | None = None,
    largest: int = 0,
    shown: str | None = None,
) -> TransferGroup:
    """Form a group; wait until all ranks have joined. Raise TransferError.

    `host`: this machine's address, as the others reach it; `device`: of NCCL's buffers; `largest`: the most bytes of a frame;
    `shown`: the listing of the memory that the trainer shows, of which receivers only know that it is not None.
    """
    if why := refusal(backend):
        raise TransferError(why)
    if backend == "ipc" and shown is not None:
        return Shown(store, rank, size, timeout_s, shown)
    if backend == "ipc":
        return Ring(store, rank, size, timeout_s, largest)
    return Collective(backend, store, rank, size, host, timeout_s, device)


class Collective:
    """A process group of PyTorch."""

    memory: Mapping[str, Image] | None = None

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        """Wait until all ranks have joined."""
        self._timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self._device = torch.device("cpu")
        self._watched = backend != "gloo"
        store = dist.PrefixStore("group", store)
        with named("join the group"):
            if backend == "gloo":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = self._timeout
                self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
            else:
                self._device = device or accelerator()
                nccl = dist.ProcessGroupNCCL.Options()
                # NCCL's watchdog ends the process of an engine; our own deadline comes long before
                nccl._timeout = 10 * self._timeout
                self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)

    def broadcast(self, frames: Frames, *, receives: bool) -> Iterator[torch.Tensor]:
        """See `TransferGroup`."""
        under_way: deque[tuple[str, torch.Tensor, torch.Tensor, Any]] = deque()
        for name, data in frames:
            moved = data if self._device.type == "cpu" else data.to(self._device)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
            with named(name):
                under_way.append((name, data, moved, self._group.broadcast([moved], options)))
            if len(under_way) == AT_ONCE:
                yield self._came(*under_way.popleft(), receives)
        while under_way:
            yield self._came(*under_way.popleft(), receives)

    def _came(
        self, name: str, data: torch.Tensor, moved: torch.Tensor, work: Any, receives: bool
    ) -> torch.Tensor:
        with named(name):
            self._wait(work)
            if receives and moved is not data:
                data.copy_(moved)
        return data

    def agree(self, content: bool) -> bool:
        """Return true if every rank is content."""
        flag = torch.tensor([int(content)], dtype=torch.int32, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MIN), self._timeout
        with named("confirm that all ranks have the bytes"):
            self._wait(self._group.allreduce([flag], options))
            return bool(flag.item())

    def _wait(self, work: Any) -> None:
        """Wait within the deadline, which NCCL's own `wait` has not: it only makes the device's stream wait."""
        deadline = time.monotonic() + self._timeout_s
        while self._watched and not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end within {self._timeout_s:g} s")
            time.sleep(_LOOK_S)
        work.wait(self._timeout)

    def close(self) -> None:
        """End every connection."""
        self._group.abort()
