"""A grading worker: `python -m gateway.grading.worker module:function`.

It imports the function and writes `{"ready": true}`; then, for each line with an episode that it reads, it writes
`{"reward": number, "calls": {...}}`, or `{"error": "..."}`, after which it goes on. It ends when there is nothing more to read,
and with its parent.

The function may print and read as it likes: standard output is standard error, and standard input is empty, before anything of
it is imported. It may be async.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from gateway.grading.base import score_of
from headgate.processes.streams import private_streams

_QUOTED = 4000
"""Characters of a traceback."""


def main(name: str) -> int:
    """Serve until the input ends. Return the exit status."""
    questions, responses = private_streams()
    try:
        function = load(name)
    except BaseException:
        _write(responses, {"error": _last_words()})
        return 1
    _write(responses, {"ready": True})
    for line in questions:
        _write(responses, _score(function, line))
    return 0


def load(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function `module:function`. Raise ValueError if the module has none of that name, and what importing it
    raises."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute, None)
    if not callable(function):
        raise ValueError(f"there is no function {attribute} in {module}")
    found: Callable[[dict[str, Any]], Any] = function
    return found


def _score(function: Callable[[dict[str, Any]], Any], line: bytes) -> dict[str, Any]:
    try:
        value = function(json.loads(line))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        score = score_of(value)
        return {"reward": score.reward, "calls": score.calls}
    except (Exception, asyncio.CancelledError):  # what the function cancels ends this grading alone
        return {"error": _last_words()}
    finally:
        sys.stdout.flush()


def _last_words() -> str:
    return traceback.format_exc()[-_QUOTED:]


def _write(responses: IO[bytes], score: dict[str, Any]) -> None:
    responses.write(json.dumps(score).encode() + b"\n")
    responses.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
