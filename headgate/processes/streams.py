"""Standard streams of a child process that responds in lines."""

from __future__ import annotations

import os
from typing import IO


def private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Return the streams to the parent, questions and responses, out of reach of whatever is imported later.

    Standard output is standard error from then on, and standard input is empty. A process that the child starts inherits neither.
    """
    questions, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, responses
