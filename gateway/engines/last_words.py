"""Why an engine's process ended, in one line of its own log."""

from __future__ import annotations

import re

_LOGGED = re.compile(r"^(?:\([^()]*\) )?(?:(?:ERROR|CRITICAL|FATAL)\b[^\[\]]*(?:\[[^\]]*\] )?)?(.*)$")
"""A line without what vLLM writes before it: which of its processes says it, how bad it is, when, and where."""
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Killed|Exit)\b: \S")
_ELSEWHERE = ("root cause above", "Engine core initialization failed")
"""What the parent of the process that failed says of it."""
_LONGEST = 300


def last_words(said: str) -> str:
    """The first error that ended something, as whatever comes after it follows from it; or else the last line."""
    lines = [match[1].strip() for line in said.splitlines() if (match := _LOGGED.match(line))]
    errors = [line for line in lines if _ERROR.match(line) and not any(word in line for word in _ELSEWHERE)]
    found = errors[:1] or [line for line in lines if line][-1:] or ["it said nothing"]
    return found[0][:_LONGEST]
