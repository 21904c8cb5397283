"""What went wrong with a checkpoint in one sentence, that names the folder and what to do. Owns no state."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer.errors import CheckpointDamaged, CheckpointError
from trainer.model.shards import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that do not depend on the bytes on the disk."""
_ANY = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StorageError,
)
GB = 10**9


@contextmanager
def writing(target: Path, needed: int = 0) -> Iterator[None]:
    """Raise CheckpointError for what fails in the block, which writes or removes `target`, of `needed` bytes."""
    try:
        yield
    except _ANY as error:
        raise CheckpointError(unwritable(target, error, needed)) from error


@contextmanager
def reading(directory: Path, *, whole: bool = False) -> Iterator[None]:
    """Raise CheckpointDamaged for what fails in the block, which reads `directory`, or CheckpointError where it may be whole.

    `whole`: its bytes are known to be those that were written.
    """
    try:
        yield
    except _ANY as error:
        cause = _cause(error)
        refused = isinstance(cause, OSError) and cause.errno in _REFUSED
        if whole or refused or isinstance(cause, RuntimeError):
            raise CheckpointError(f"{directory} cannot be read: {_words(cause)}") from error
        raise CheckpointDamaged(f"{directory} is damaged: {_words(cause)}") from error


def unwritable(target: Path, error: BaseException, needed: int = 0) -> str:
    """Return the sentence for an error in writing `target`, of `needed` bytes."""
    cause = _cause(error)
    # safetensors' own library has no other type for it.
    if (isinstance(cause, OSError) and cause.errno in _FULL) or f"os error {errno.ENOSPC}" in str(cause):
        return f"{target} cannot be written: {_full(target.parent, needed)}"
    return f"{target} cannot be written: {_words(cause)}"


def check_space(target: Path, needed: int) -> None:
    """Raise OSError if the disk of `target` has not `needed` bytes free."""
    if shutil.disk_usage(existing(target)).free < needed:
        raise OSError(errno.ENOSPC, "the disk is full", str(target))


def existing(path: Path) -> Path:
    """Return the nearest folder above `path` that exists."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def _full(directory: Path, needed: int) -> str:
    free = f"{shutil.disk_usage(existing(directory / '_')).free / GB:.3g} GB are free"
    if not needed:
        return f"the disk of {directory} is full, {free}: make room, and start again"
    return (
        f"the disk of {directory} is full, a checkpoint takes {needed / GB:.3g} GB and {free}: make room, lower [checkpoint] keep"
        " or move [run] dir to a larger disk, and start again, which continues from the newest checkpoint"
    )


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, where torch has gathered them."""
    if isinstance(error, StorageError) and error.failures:
        return _cause(next(iter(error.failures.values()))[0])
    return error


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
