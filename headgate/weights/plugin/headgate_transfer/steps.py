"""The error of a transfer, which names the step that was not done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TransferError(RuntimeError):
    """A transfer that was not completed; the message names the step."""


@contextmanager
def named(step: str) -> Iterator[None]:
    """Names the step in the errors of torch."""
    try:
        yield
    except TransferError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise TransferError(f"could not {step}: {(str(error).splitlines() or [''])[0][:300]}") from error
