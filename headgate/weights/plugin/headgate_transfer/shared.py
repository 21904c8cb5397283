"""Groups of one machine, whose bytes lie in memory that all ranks see; the store has the position of each rank.

`Ring` copies frames into a ring and out of it. `Shown` copies nothing: the sender names memory in which the version is already
(`handles`), and the receivers open it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import handles
from .handles import Image
from .steps import named

AT_ONCE = 3
"""Frames that are on their way concurrently."""
Frames = Iterable[tuple[str, torch.Tensor]]
"""The name of each step, and its bytes in the host's memory."""


class _Stored:
    """Ranks that agree through a store."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._sends, self._readers = dist.PrefixStore("shared", store), rank == 0, size - 1
        self._timeout = timedelta(seconds=timeout_s)

    def agree(self, content: bool) -> bool:
        """Return true if every rank is content."""
        with named("confirm that all ranks have the bytes"):
            if not content:
                self._store.set("wrong", "")
            self._all_have("done", 0, all_ranks=True)
            agreed = not self._store.check(["wrong"])
            self._all_have(
                "left", 0
            )  # the store is the sender's, which may end it once no rank reads it any more
            return agreed

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


class Ring(_Stored):
    """A ring of frames in the shared memory of one machine."""

    memory: Mapping[str, Image] | None = None

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, largest: int) -> None:
        """Wait until all ranks have joined. `largest`: the most bytes of a frame."""
        super().__init__(store, rank, size, timeout_s)
        self._slot = max(1, largest)
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
        path = handles.shared_file(AT_ONCE * self._slot)
        self._store.set("memory", str(path))
        return path

    def broadcast(self, frames: Frames, *, receives: bool) -> Iterator[torch.Tensor]:
        """See `TransferGroup`."""
        number = -1
        for number, (name, data) in enumerate(frames):
            start = number % AT_ONCE * self._slot
            place = self._ring[start : start + len(data)]
            with named(name):
                if receives:
                    self._wait_for(f"frame-{number}")
                    data.copy_(place)
                    self._all_have("took", number)
                else:
                    if number >= AT_ONCE:
                        self._wait_for(f"took-{number - AT_ONCE}")
                    place.copy_(data)
                    self._store.set(f"frame-{number}", "")
            yield data


class Shown(_Stored):
    """Memory that the trainer shows: the receivers open it where it is."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, listing: str) -> None:
        """Wait until all ranks have opened it. `listing`: what the sender shows (`handles.images`), as JSON."""
        super().__init__(store, rank, size, timeout_s)
        self.memory: Mapping[str, Image] | None = None
        with named("open the trainer's memory"):
            if self._sends:
                self._store.set("listing", listing)
            else:
                self.memory = handles.images(json.loads(self._wait_for("listing")))
            self._all_have("opened", 0)

    def broadcast(self, frames: Frames, *, receives: bool) -> Iterator[torch.Tensor]:
        """Yield every frame; all are there already. The sender follows the receivers, so that each frame has a deadline."""
        for number, (name, data) in enumerate(frames):
            if receives:
                yield data
                self._all_have("took", number)
            else:
                with named(name):
                    self._wait_for(f"took-{number}")
                yield data
