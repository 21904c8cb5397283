"""Errors of child processes."""

from __future__ import annotations


class ProcessError(Exception):
    """A process that cannot run as it should; the message has the reason."""


class ChildDied(ProcessError):
    """A child process ended although it was needed, or could not be started; the message quotes its last lines."""


class GivenUp(ProcessError):
    """A process is not started again."""
