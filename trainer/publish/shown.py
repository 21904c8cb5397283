"""The newest version in this process's memory, where engines of this machine open it: `[publish] transport = "ipc"`.

Owns one arena, and the listing `v000007.shown` next to the version's folder, by which the server of versions finds it.
Invariants: a version is listed only once its folder is whole, so what engines take from memory can be loaded from the disk by any
engine or gateway that starts later; a listing goes before the bytes that it lists are replaced. A process that is killed leaves
a listing whose owner is gone, which no process uses and the next start removes. Engines compare every piece that they open with
the manifest's hash.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headgate.weights.manifest import MANIFEST
from headgate.weights.plugin.headgate_transfer import handles
from headgate.weights.plugin.headgate_transfer.devices import Device

log = logging.getLogger(__name__)
_SUFFIX = ".shown"


class ShownVersion:
    """The version that this process shows, if any."""

    def __init__(self, directory: Path, device: str) -> None:
        """`directory`: of versions; `device`: "cpu" for the host's shared memory, else the accelerator's own."""
        self._directory, self._device = directory, torch.device(device)
        self._arena: handles.Arena | None = None
        self._places: dict[str, tuple[int, int]] = {}
        self.withdraw()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a version's tensors, by their names in the checkpoint, in place of the version before.

        Raise OSError or RuntimeError without room.
        """
        self.withdraw()
        size = handles.size_of(tensors.values())
        if self._arena is None or len(self._arena) < size:
            self.close()
            self._arena = handles.Arena(size, self._device)
        self._places = self._arena.fill(tensors)

    def show(self, folder: Path) -> None:
        """List the version that was filled last, whose folder is whole. Raise OSError, and ValueError if it has other tensors."""
        assert self._arena is not None
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        listed = {
            name: self._listed(folder / name, entry) for name, entry in files.items() if "header" in entry
        }
        listing = {"pid": os.getpid(), "handle": self._arena.handle, "files": listed}
        path = _listing_of(folder)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(listing))
        temporary.rename(path)

    def _listed(self, file: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
        parts = []
        for name, stored in entry["tensors"].items():
            place, size = self._places.get(name, (0, -1))
            if size != stored["size"]:
                raise ValueError(f"{file} has {name}, which the model in memory does not have in that form")
            parts.append((stored["offset"], place, size))
        with file.open("rb") as data:
            header = data.read(entry["header"]["size"])
        return {"header": header.hex(), "parts": parts}

    def withdraw(self) -> None:
        """Show nothing any more."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Show nothing, and give the memory back."""
        self.withdraw()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _listing_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


def listing_for(folder: Path, backend: str, workers: Sequence[Device]) -> str | None:
    """Return the listing of a version, if its owner lives, all workers can open it, and the backend allows it."""
    try:
        text = _listing_of(folder).read_text()
        listing = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not shown: %s", folder, error)
        return None
    alive = Path(f"/proc/{listing['pid']}").exists()
    can_open = bool(workers) and all(handles.opens(listing["handle"], worker) for worker in workers)
    return text if backend in ("auto", "ipc") and alive and can_open else None
