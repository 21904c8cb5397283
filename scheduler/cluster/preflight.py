"""Checks that the programs and checkpoints of a cluster's files exist on this machine, before processes are started.

The gateway runs on this machine, and every node has the same folder and environment (docs/topics/scheduler.md), so a missing file
is missing on all nodes.
"""

from __future__ import annotations

import os
import shutil
from urllib.parse import urlsplit

from scheduler.cluster.errors import BadFile
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.gateway_file import GatewayFile

_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")
"""Hosts that mean the client's own machine."""


def examine(file: ClusterFile, gateway: GatewayFile) -> list[str]:
    """Return warnings. Raise BadFile for a missing interpreter of the engines or a missing checkpoint."""
    where = gateway.path
    own_command = "command" in file.engine.model_fields_set
    if gateway.starts_vllm and not own_command and shutil.which(os.path.expanduser(gateway.python)) is None:
        raise BadFile(
            f"{where}: [engine] python = {gateway.python!r}: no such program; name the Python of vLLM's environment"
        )
    if gateway.checkpoint is not None and not (gateway.checkpoint / "config.json").is_file():
        raise BadFile(
            f"{where}: [models.{gateway.model}] path = {str(gateway.checkpoint)!r}: no checkpoint exists there"
        )
    host = urlsplit(gateway.public_url).hostname or ""
    if file.cluster.launcher == "ray" and host in _LOOPBACK:
        return [
            f"warning: agents get the URL {gateway.public_url}/v1, which works only on this machine: set"
            f" [server] public_url in {where}, or HEADGATE_PUBLIC_URL"
        ]
    return []
