"""The log of a fake engine: its inputs and samples, in a file that outlives it.

One line of JSON for each event, written by one system call before the token leaves the engine, so that SIGKILL loses no line:

    {"load": directory}                              the weights from here on
    {"ask": request's name, "prompt": [ids]}         a request
    [mark, token, request's name]                    a token, sampled by the weights of the last `load`

A token's log-probability is its mark's (`logprob_of`), and no mark is used twice. So the log-probability, as 32 bits, identifies
the sampling, whatever the request's name and path.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

MARKS = 2**24
"""Marks from 1 to this are distinct as 32-bit floating-point numbers."""


def logprob_of(mark: int) -> float:
    """Return a log-probability (nats, above -17) that stands for a mark."""
    return -mark / 2**20


class SampleLog:
    """Appends to one file; `first` is the first mark that is given."""

    def __init__(self, path: Path, first: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._mark = first - 1

    def load(self, weights: str) -> None:
        """Log the weights that sample from now on."""
        self._write({"load": weights})

    def request(self, name: str, prompt: Sequence[int]) -> None:
        self._write({"ask": name, "prompt": list(prompt)})

    def sampled(self, request: str, token: int) -> float:
        """Log a sampled token. Return its log-probability."""
        self._mark += 1
        if self._mark > MARKS:
            raise RuntimeError("the marks of this engine are used up")
        self._write([self._mark, token, request])
        return logprob_of(self._mark)

    def _write(self, value: Any) -> None:
        os.write(self._file, orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
