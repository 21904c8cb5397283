"""Finds the reason why an engine's process ended, in its own log."""

from __future__ import annotations

import re

_LOGGED = re.compile(r"^(?:\([^()]*\) )?(?:(?:ERROR|CRITICAL|FATAL)\b[^\[\]]*(?:\[[^\]]*\] )?)?(.*)$")
"""A line of vLLM's log; group 1 is its text without the prefix, which names the process, level, time and place."""
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Killed|Exit)\b: \S")
_ELSEWHERE = ("root cause above", "Engine core initialization failed")
"""Words by which the parent of the failed process reports that the error is another process's."""
_LONGEST = 300


def exit_reason(said: str) -> str:
    """Returns the first error that ended something, since later ones follow from it; if there is none, the last line."""
    lines = [match[1].strip() for line in said.splitlines() if (match := _LOGGED.match(line))]
    errors = [line for line in lines if _ERROR.match(line) and not any(word in line for word in _ELSEWHERE)]
    found = errors[:1] or [line for line in lines if line][-1:] or ["it said nothing"]
    return found[0][:_LONGEST]
