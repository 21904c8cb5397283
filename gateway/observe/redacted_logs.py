"""Keeps what `[redaction]` finds out of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.render.redaction import Redactor


class _Redacting(logging.Formatter):
    """Redacts the lines of another formatter."""

    def __init__(self, formatter: logging.Formatter, redactor: Redactor) -> None:
        super().__init__()
        self._formatter = formatter
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.line(self._formatter.format(record))


@contextmanager
def redacted_logs(redactor: Redactor) -> Iterator[None]:
    """Redact the lines of the present handlers of the root logger, until the context ends."""
    handlers = logging.getLogger().handlers if redactor.active else []
    before = [(handler, handler.formatter) for handler in handlers]
    for handler, formatter in before:
        handler.setFormatter(_Redacting(formatter or logging.Formatter(), redactor))
    try:
        yield
    finally:
        for handler, formatter in before:
            handler.setFormatter(formatter)
