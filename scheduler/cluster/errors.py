"""Errors of putting a cluster together. Every message says what to do about it."""

from __future__ import annotations

from processes.errors import ProcessError


class ClusterError(ProcessError):
    """A cluster that cannot run as its file says."""


class BadFile(ClusterError):
    """A cluster file, or one that it names, that cannot be used; the message names the file and every wrong key."""


class Unsatisfied(ClusterError):
    """No node has the tags, or the capacity, that something needs; the message names it, and what there is."""


class OutOfMemory(ClusterError):
    """Processes that do not fit on their GPU, together or in turn; the message has the arithmetic."""


class MissingRay(ClusterError):
    """`launcher = "ray"` where Ray is not installed."""


class Refused(ClusterError):
    """A Ray cluster that lets anybody in, or none at all."""


class NodeLost(ClusterError):
    """A node went away under what ran on it."""
