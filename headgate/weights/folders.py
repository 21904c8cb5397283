"""Folders named after a version, such as `v000007`: checkpoints, published versions, and copies of them.

Invariant: a folder of that name is there whole or not at all. It is written under another name, brought to the disk (`sync`) and
renamed; `remove` renames it before it deletes anything.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import TracebackType

DELETED = ".gone"
"""The suffix of a folder that is being deleted."""
_NAME = re.compile(r"v(\d{6,})")


def name_of(version: int) -> str:
    """Return the name of a version's folder."""
    return f"v{version:06d}"


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the safetensors files in a folder; 0 if it has none or is not there."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def version_of(name: str) -> int | None:
    """Return the version that a name names; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def versions_in(directory: Path) -> dict[int, Path]:
    """Return the folders of versions in a directory, from the lowest version to the highest; none if there is no such
    directory."""
    if not directory.is_dir():
        return {}
    found = {version_of(path.name): path for path in directory.iterdir() if path.is_dir()}
    return dict(sorted((version, path) for version, path in found.items() if version is not None))


def prune(directory: Path, keep: int, *needed: int | None) -> None:
    """Remove the lowest versions beyond `keep`, but none that is `needed`."""
    for version, path in list(versions_in(directory).items())[:-keep]:
        if version not in needed:
            remove(path)


def remove(folder: Path) -> None:
    """Remove a folder so that none of its name is ever seen in part."""
    deleted = folder.with_name(f".{folder.name}{DELETED}")
    folder.rename(deleted)
    shutil.rmtree(deleted)


def sweep(directory: Path) -> None:
    """Remove what is left of folders that a process was deleting when it was killed."""
    for deleted in directory.glob(f".*{DELETED}"):
        shutil.rmtree(deleted, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicDirectory:
    """A directory that appears whole or not at all: filled under another name, fsynced, renamed at the end of the block.

    Raise FileExistsError if there is one of the name. What an earlier process left half-written under the name is removed.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")

    def __enter__(self) -> Path:
        if self.target.exists():
            raise FileExistsError(f"{self.target} exists; a version is written once")
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.target.parent.glob(f".{self.target.name}.tmp-*"):
            shutil.rmtree(leftover)
        self._temporary.mkdir()
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        for path in (*sorted(p for p in self._temporary.rglob("*")), self._temporary):
            sync(path)
        self._temporary.rename(self.target)
        sync(self.target.parent)
