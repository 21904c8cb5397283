"""The files that a run writes about single steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def samples_file(directory: Path, step: int) -> Path:
    """Return the path of a step's sample of episodes, under `[run] dir`."""
    return directory / "samples" / f"step-{step:06d}.jsonl"


def tokens_file(directory: Path, step: int) -> Path:
    """Return the path of a step's per-token figures, under `[run] dir`."""
    return directory / "tokens" / f"step-{step:06d}.parquet"


def delete_oldest(newest: Path, limit_bytes: int) -> None:
    """Delete the oldest files of the kind and folder of `newest` until the rest has at most `limit_bytes`. Keep `newest`."""
    files = [path for path in newest.parent.glob(f"step-*{newest.suffix}") if path != newest]
    files.sort(key=lambda path: path.stat().st_mtime_ns)
    total = sum(path.stat().st_size for path in (*files, newest))
    for path in files:
        if total <= limit_bytes:
            return
        total -= path.stat().st_size
        path.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file appears as `path` at the end of the block, and not if the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
