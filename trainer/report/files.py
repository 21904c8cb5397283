"""The files that a run writes about single steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def samples_file(directory: Path, step: int) -> Path:
    """The file of a step's sample of episodes, under `[run] dir`."""
    return directory / "samples" / f"step-{step:06d}.jsonl"


def tokens_file(directory: Path, step: int) -> Path:
    """The file of a step's per-token figures, under `[run] dir`."""
    return directory / "tokens" / f"step-{step:06d}.parquet"


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to; what was written appears as `path` at the end of the block, and not at all if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
