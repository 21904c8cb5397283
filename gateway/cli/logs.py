"""The format of the gateway's log lines. No line contains text from a client, an engine or an upstream.

Messages of other libraries' exceptions may quote values, or a whole row of the database, so a line has only their type and where
they were raised. Our errors (`headgate/errors.py`) and the operating system's do not quote texts, so their messages are logged.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from types import TracebackType

from headgate.errors import GatewayError

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def safe_text(error: BaseException) -> str:
    """Return an error as text without any client's data."""
    kind = type(error).__name__
    if isinstance(error, GatewayError | OSError):
        return f"{kind}: {error}"
    # From SQLAlchemy, about an unreachable server; the message contains the statement's parameters
    if kind == "OperationalError":
        return f"{kind}: {getattr(error, 'orig', None) or ''}"
    return kind


class Formatter(logging.Formatter):
    """Writes exceptions as `safe_text` does, also those that are arguments of a message."""

    def format(self, record: logging.LogRecord) -> str:
        if record.args and not isinstance(record.args, Mapping):
            record = logging.makeLogRecord(record.__dict__)
            record.args = tuple(
                _SafeException(a) if isinstance(a, BaseException) else a for a in record.args or ()
            )
        record.exc_text = None  # another handler may have cached its own format
        return super().format(record)

    def formatException(self, ei: _ExcInfo) -> str:
        """Return the stack, and what was raised."""
        lines, error, known = [], ei[1], set()
        while error is not None and id(error) not in known:
            known.add(id(error))
            frames = "".join(traceback.format_tb(error.__traceback__))
            lines.append(f"{frames}{safe_text(error)}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\nwhile handling, or because of:\n".join(lines)


class _SafeException:
    """Stands for an exception among the arguments of a message."""

    def __init__(self, error: BaseException) -> None:
        self._text = safe_text(error)

    def __repr__(self) -> str:
        return self._text
