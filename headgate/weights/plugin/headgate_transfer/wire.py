"""The bytes of a version from one process to several, and the proof that they are those of the manifest.

Groups (`groups`) are formed for one transfer and never used again: rank 0 has the version's files, every other rank is a worker
of one engine. Files travel in frames of whole pieces (the manifest's), each a broadcast; at the end all ranks report whether they
are content. Invariants: every operation has a deadline, and the error names it; a `Receiver` gives out only bytes whose hashes
are the manifest's.
"""

from __future__ import annotations

import json
import logging
import mmap
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3

from .devices import Device
from .groups import (
    Lanes,
    TransferError,
    TransferGroup,
    accelerator,
    chosen,
    lanes_of,
    open_group,
    refusal,
)
from .handles import Image
from .shared import AT_ONCE
from .steps import named

log = logging.getLogger("vllm.headgate_transfer")
"""Under vLLM's own, which is shown."""
FRAME = 2**24
"""The most bytes of one broadcast; a piece that is larger is a frame of its own."""
_PLAN = "plan"
_NAMED: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

Plan = Mapping[str, Sequence[tuple[int, str]]]
"""The pieces of each file, in the order of their bytes: size and BLAKE3."""


@dataclass
class Join:
    """The place of one engine's workers in a group."""

    version: int
    backend: str
    address: str
    port: int
    """The address and port of the sender's store, where the ranks find one another."""
    world_size: int
    plan: dict[str, list[tuple[int, str]]]
    timeout_s: float
    """The deadline of each operation."""
    rank_offset: int = 1
    lanes: int = 1
    """Groups side by side, each with a share of the frames."""
    shown: bool = False
    """True: the trainer shows the version in its memory, and nothing is to be received."""

    def __post_init__(self) -> None:
        if why := refusal(self.backend):
            raise ValueError(why)


@dataclass(frozen=True)
class Frame:
    """Pieces of a file that travel together."""

    file: str
    start: int
    pieces: tuple[tuple[int, str], ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(size for size, _ in self.pieces)

    def of(self, files: Mapping[str, Image]) -> torch.Tensor:
        """Its bytes in a version's files."""
        return files[self.file].span(self.start, self.start + self.size)


def frames_of(plan: Plan) -> Iterator[Frame]:
    """Yield the frames of a version, in the order in which they travel."""
    for file in sorted(plan):
        start = size = 0
        pieces_of_frame: list[tuple[int, str]] = []
        for piece in plan[file]:
            if pieces_of_frame and size + piece[0] > FRAME:
                yield Frame(file, start, tuple(pieces_of_frame))
                start, size, pieces_of_frame = start + size, 0, []
            pieces_of_frame.append((piece[0], piece[1]))
            size += piece[0]
        if size:
            yield Frame(file, start, tuple(pieces_of_frame))


def digest_of(plan: Plan) -> str:
    """Return the hash of a plan."""
    return blake3(
        json.dumps({file: list(map(list, plan[file])) for file in sorted(plan)}).encode()
    ).hexdigest()


class Sender:
    """Rank 0 of a transfer: opens a port, and sends the files of a folder to the ranks that join."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        backend: str,
        host: str,
        workers: int,
        timeout_s: float,
        lanes: int | None = None,
        devices: Sequence[Device] = (),
        shown: str | None = None,
    ) -> None:
        """`host`: the address of this machine by which engines reach it; `lanes`: as many as the backend has without a number;
        `devices`: the workers', where they are known; `shown`: the listing of the memory in which the trainer has the version
        already, for workers that can open it: then nothing is sent.

        Raise TransferError for a backend that cannot be used here, or not with these devices.
        """
        self.backend = chosen(backend, devices) if shown is None else "ipc"
        self._shown = shown
        if why := refusal(self.backend, devices):
            raise TransferError(why)
        self._folder, self._plan, self._host = folder, plan, host
        self._size, self._timeout_s = workers + 1, timeout_s
        self.lanes = lanes or lanes_of(self.backend)
        self._store = dist.TCPStore(
            "0.0.0.0", 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )  # fmt: skip
        self._store.set(_PLAN, digest_of(plan))
        self.port: int = self._store.port

    def send(self) -> None:
        """Send everything; blocks, so call it in a thread. Raise TransferError and OSError."""
        lanes = Lanes(self._lane, self.lanes)
        try:
            with _Files(self._folder, self._plan) as files:
                frames = list(frames_of(self._plan))

                def send(group: TransferGroup, lane: int) -> None:
                    own = ((_step("send", frame), frame.of(files)) for frame in frames[lane :: self.lanes])
                    for _ in group.broadcast(own, receives=False):
                        pass

                lanes.run(send)
            if not lanes.agree(content=True):
                raise TransferError(f"an engine refused what it received: {self._reason()}")
        finally:
            lanes.close()

    def _lane(self, lane: int) -> TransferGroup:
        device = accelerator(lane) if self.backend.startswith("nccl") else None
        store = dist.PrefixStore(f"lane-{lane}", self._store)
        place = self.backend, store, 0, self._size, self._host, self._timeout_s
        return open_group(*place, device, _largest(self._plan), self._shown)

    def _reason(self) -> str:
        keys = [_wrong_key(rank) for rank in range(1, self._size)]
        return next(
            (self._store.get(key).decode() for key in keys if self._store.check([key])), "it gave no reason"
        )


class _Files:
    """The bytes of a version's files, as the system's page cache has them."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan

    def __enter__(self) -> dict[str, Image]:
        found = {}
        for name, pieces in self._plan.items():
            with (self._folder / name).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            found[name] = Image([(0, torch.frombuffer(mapped, dtype=torch.uint8))])
            if len(mapped) != sum(size for size, _ in pieces):
                raise TransferError(f"{self._folder / name} does not have the size of its manifest")
        return found

    def __exit__(self, *_: object) -> None:
        return  # the mappings end with the last tensor


@dataclass
class Received:
    """A version as it came."""

    version: int
    files: dict[str, Image] = field(default_factory=dict)
    """The bytes of each file."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, by its name in the checkpoint; views of the files' bytes, on the device that has them."""
        for image in self.files.values():
            begin = 8 + int.from_bytes(bytes(image.span(0, 8).numpy()), "little")
            header = json.loads(bytes(image.span(8, begin).numpy()))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = (begin + place for place in entry["data_offsets"])
                kind = _NAMED[entry["dtype"]]
                part = image.span(start, end)
                # a view needs an aligned start, which safetensors gives no promise of
                aligned = part if part.data_ptr() % kind.itemsize == 0 else part.clone()
                yield name, aligned.view(kind).reshape(entry["shape"])


class Receiver:
    """One worker's receipt of a version: a thread, so that the engine samples on."""

    def __init__(self, join: Join, rank: int, on_frame: Callable[[int], None] | None = None) -> None:
        """`on_frame` is called in the thread before each frame, with its number."""
        self.version = join.version
        self._join, self._rank, self._on_frame = join, rank, on_frame
        # read in the worker's own thread, for another's is the first of the machine
        self._device = accelerator() if join.backend.startswith("nccl") or _shows_gpu(join) else None
        self._outcome: Future[Received] = Future()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"weights-of-{join.version}", daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """Give the version up: the thread ends before its next frame."""
        self._abandoned = True

    def result(self, timeout_s: float) -> Received:
        """Return the received files. Raise TransferError if they are missing, or differ from the manifest."""
        try:
            return self._outcome.result(timeout_s)
        except TimeoutError as error:
            raise TransferError(f"version {self.version} was not received within {timeout_s:g} s") from error

    def _run(self) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._outcome.set_result(self._receive())
        except BaseException as error:
            log.error("version %d was not received: %s", self.version, error)
            self._outcome.set_exception(error)

    def _receive(self) -> Received:
        join = self._join
        with named("reach the sender"):
            limit = timedelta(seconds=join.timeout_s)
            store = dist.TCPStore(join.address, join.port, None, is_master=False, timeout=limit)
            if store.get(_PLAN).decode() != digest_of(join.plan):
                raise TransferError(f"the sender has another version {join.version} than the manifest")
        here = _own_address(join.address, join.port)

        def lane(number: int) -> TransferGroup:
            inner = dist.PrefixStore(f"lane-{number}", store)
            place = join.backend, inner, self._rank, join.world_size, here, join.timeout_s
            return open_group(*place, self._device, _largest(join.plan), "" if join.shown else None)

        lanes = Lanes(lane, join.lanes)
        try:
            received, wrong = self._receive_all(lanes)
            if wrong:
                store.set(_wrong_key(self._rank), wrong)
            lanes.agree(content=not wrong)
        finally:
            lanes.close()
        if wrong:
            raise TransferError(wrong)
        return received

    def _receive_all(self, lanes: Lanes) -> tuple[Received, str]:
        """Receive all frames, and return them with the first error (empty: none); hashes are computed while the next
        frame is on its way."""
        plan = self._join.plan
        received = Received(self.version)
        for name, pieces in plan.items():
            received.files[name] = (lanes.memory or {}).get(name) or Image.empty(
                sum(size for size, _ in pieces)
            )
        frames = list(frames_of(plan))

        def receive_lane(group: TransferGroup, lane: int) -> str:
            own = frames[lane :: self._join.lanes]
            came, wrong, looks = (
                group.broadcast(self._places(own, received), receives=True),
                "",
                deque[Future[str]](),
            )
            with ThreadPoolExecutor(1, "weights-hash") as looker:
                for frame, data in zip(own, came, strict=True):
                    looks.append(looker.submit(_wrong_in, data, frame))
                    if len(looks) > AT_ONCE:
                        wrong = wrong or looks.popleft().result()
            return wrong or next((found for look in looks if (found := look.result())), "")

        return received, next(filter(None, lanes.run(receive_lane)), "")

    def _places(self, frames: Sequence[Frame], received: Received) -> Iterator[tuple[str, torch.Tensor]]:
        for number, frame in enumerate(frames):
            if self._on_frame is not None:
                self._on_frame(number)
            if self._abandoned:
                raise TransferError(f"version {self.version} is wanted no more")
            yield _step("receive", frame), frame.of(received.files)


def _wrong_in(data: torch.Tensor, frame: Frame) -> str:
    at, view = 0, memoryview(data.cpu().numpy().data)
    for size, digest in frame.pieces:
        if blake3(view[at : at + size]).hexdigest() != digest:
            return f"{frame.file}: the {size} bytes at {frame.start + at} are not the manifest's"
        at += size
    return ""


def _shows_gpu(join: Join) -> bool:
    return join.shown and torch.cuda.is_available()


def _largest(plan: Plan) -> int:
    return max((frame.size for frame in frames_of(plan)), default=0)


def _wrong_key(rank: int) -> str:
    return f"wrong-{rank}"


def _step(verb: str, frame: Frame) -> str:
    return f"{verb} {frame.size} bytes at {frame.start} of {frame.file}"


def _own_address(host: str, port: int) -> str:
    """Return this machine's address on the way to another."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
