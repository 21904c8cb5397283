"""The images of a run's episodes as files by their hash, in a folder that all ranks share.

Owns `[run] dir/images`. Invariants: a file's name is the SHA-256 of its bytes; an existing file is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from trainer.errors import FeedBroken

IMAGE_CACHE_BYTES = 4 * 2**30


class ImageFiles:
    """The files that were fetched in a run."""

    def __init__(self, directory: Path, limit: int) -> None:
        """`limit`: bytes, beyond which `trim` removes files."""
        self._directory = directory
        self._limit = limit

    def has(self, name: str) -> bool:
        """Return true if a file exists, and mark it as the most recently used."""
        try:
            os.utime(self._directory / name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raise OSError if it does not exist."""
        return (self._directory / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Store a file. Raise FeedBroken if it has another hash."""
        if (own := hashlib.sha256(data).hexdigest()) != name:
            raise FeedBroken(f"the gateway's image {name} has the hash {own}")
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f".{name}"
        temporary.write_bytes(data)
        temporary.rename(self._directory / name)

    def trim(self, needed: Collection[str] = ()) -> None:
        """Remove the files that were used longest ago, until the others are within the limit; those `needed` stay."""
        if not self._directory.is_dir():
            return
        files = [(path.stat(), path) for path in self._directory.iterdir()]
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if total <= self._limit:
                return
            if path.name not in needed:
                path.unlink()
                total -= stat.st_size
