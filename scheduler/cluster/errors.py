"""Errors of a cluster. Every message explains the fix."""

from __future__ import annotations

from headgate.processes.errors import ProcessError


class ClusterError(ProcessError):
    """A cluster that cannot run."""


class BadFile(ClusterError):
    """An unusable cluster file, or file that it names; the message has the file and every wrong key."""


class Unsatisfied(ClusterError):
    """No node has the tags or the capacity that a process needs; the message has the need and the present nodes."""


class OutOfMemory(ClusterError):
    """Processes that do not fit on their GPU, together or in turn; the message has the arithmetic."""


class MissingRay(ClusterError):
    """`launcher = "ray"` where Ray is not installed."""


class Refused(ClusterError):
    """A Ray cluster without authentication, or none."""


class NodeLost(ClusterError):
    """A node was lost with its processes."""
