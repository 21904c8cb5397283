"""The ways in which the bytes of a transfer travel from a sender to an engine's workers, all behind one interface.

| backend | how | needs |
|---|---|---|
| gloo | TCP, from host memory to host memory | nothing |
| nccl | NCCL, by way of a buffer on the accelerator at both ends | an accelerator at both ends, and not the same one |
| nccl_m2n | NCCL, one lane for each accelerator of the trainer's machine, each with a share of the frames | as nccl |
| ipc | shared memory of one machine: one copy in, one out | the sender's `/dev/shm` |

Invariants: every operation has a deadline, and its error names the step; a group that is closed ends what its other ranks wait
for, at the latest by their own deadlines; what this installation cannot do is refused by name before any rank waits (`refusal`).
"""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from . import devices
from .devices import SHARED, Device

T = TypeVar("T")
BACKENDS = ("gloo", "nccl", "nccl_m2n", "ipc")
_AT_ONCE = 3
"""Frames that are on their way concurrently."""
_LARGEST = 2**24
"""The bytes of a usual frame."""
_LOOK_S = 0.0005
_NAME = "headgate-transfer-"
Frames = Iterable[tuple[str, torch.Tensor]]
"""The name of each step, and its bytes in the host's memory."""


class TransferError(RuntimeError):
    """A transfer that was not completed; the message names the step."""


class TransferGroup(Protocol):
    """The ranks of one lane; rank 0 sends. Close it: what others still wait for then ends with an error there."""

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
        ways += ["ipc"] if devices.room() >= _AT_ONCE * _LARGEST else []
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
) -> TransferGroup:
    """Form a group; wait until all ranks have joined. Raise TransferError.

    `host`: this machine's address, as the others reach it; `device`: of NCCL's buffers; `largest`: the most bytes of a frame.
    """
    if why := refusal(backend):
        raise TransferError(why)
    if backend == "ipc":
        return Shared(store, rank, size, timeout_s, largest)
    return Collective(backend, store, rank, size, host, timeout_s, device)


class Collective:
    """A process group of PyTorch."""

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
            if len(under_way) == _AT_ONCE:
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


class Shared:
    """A ring of frames in the shared memory of one machine; the store has the position of each rank."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, largest: int) -> None:
        """Wait until all ranks have joined. `largest`: the most bytes of a frame."""
        self._store, self._sends, self._readers = dist.PrefixStore("shared", store), rank == 0, size - 1
        self._timeout, self._slot = timedelta(seconds=timeout_s), max(1, largest)
        with named("share memory with the other side, which must be on this machine"):
            path = self._made() if self._sends else Path(self._wait_for("memory"))
            try:
                with path.open("r+b") as file:
                    self._memory = mmap.mmap(file.fileno(), 0)
                self._all_have("opened", 0)
            finally:
                if self._sends:
                    path.unlink()  # what is open stays; a process that is killed leaves nothing
        self._ring = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _made(self) -> Path:
        _sweep()
        descriptor, name = tempfile.mkstemp(prefix=f"{_NAME}{os.getpid()}-", dir=SHARED)
        try:
            os.posix_fallocate(descriptor, 0, _AT_ONCE * self._slot)
        finally:
            os.close(descriptor)
        self._store.set("memory", name)
        return Path(name)

    def broadcast(self, frames: Frames, *, receives: bool) -> Iterator[torch.Tensor]:
        """See `TransferGroup`."""
        number = -1
        for number, (name, data) in enumerate(frames):
            start = number % _AT_ONCE * self._slot
            place = self._ring[start : start + len(data)]
            with named(name):
                if receives:
                    self._wait_for(f"frame-{number}")
                    data.copy_(place)
                    self._all_have("took", number)
                else:
                    if number >= _AT_ONCE:
                        self._wait_for(f"took-{number - _AT_ONCE}")
                    place.copy_(data)
                    self._store.set(f"frame-{number}", "")
            yield data

    def agree(self, content: bool) -> bool:
        """Return true if every rank is content."""
        with named("confirm that all ranks have the bytes"):
            if not content:
                self._store.set("wrong", "")
            self._all_have("done", 0, all_ranks=True)
            return not self._store.check(["wrong"])

    def _all_have(self, what: str, number: int, *, all_ranks: bool = False) -> None:
        """Report that a reader has done a step; the sender, or with `all_ranks` every rank, waits until all have."""
        key = f"{what}-{number}"
        ranks = self._readers + all_ranks
        if (all_ranks or not self._sends) and self._store.add(f"{key}-count", 1) == ranks:
            self._store.set(key, "")
        if all_ranks or self._sends:
            self._wait_for(key)

    def _wait_for(self, key: str) -> str:
        self._store.wait([key], self._timeout)
        return str(self._store.get(key).decode())

    def close(self) -> None:
        """Nothing is left: the memory goes with the last tensor that shows it."""


def _sweep() -> None:
    """Remove the files of dead processes, which were killed before all ranks had opened them."""
    for path in SHARED.glob(f"{_NAME}*"):
        found = re.fullmatch(rf"{_NAME}(\d+)-.*", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            path.unlink(missing_ok=True)


@contextmanager
def named(step: str) -> Iterator[None]:
    """Names the step in the errors of torch."""
    try:
        yield
    except TransferError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise TransferError(f"could not {step}: {(str(error).splitlines() or [''])[0][:300]}") from error
