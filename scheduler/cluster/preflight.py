"""Looks on this machine for what a cluster's files name, before anything is started.

`scheduler run` is started where the gateway will be, and every node has the same folder and environment (docs/scheduler.md), so
what is missing here is missing there.
"""

from __future__ import annotations

import os
import shutil
from urllib.parse import urlsplit

from scheduler.cluster.errors import BadFile
from scheduler.cluster.file import ClusterFile
from scheduler.cluster.gateway_file import GatewayFile

_NOWHERE = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")
"""Hosts that mean the machine itself, whichever asks."""


def examine(file: ClusterFile, gateway: GatewayFile) -> list[str]:
    """Warnings. Raises BadFile for an interpreter of the engines or a checkpoint that is not here."""
    where = gateway.path
    own_command = "command" in file.engine.model_fields_set
    if gateway.starts_vllm and not own_command and shutil.which(os.path.expanduser(gateway.python)) is None:
        raise BadFile(
            f"{where}: [engine] python = {gateway.python!r}: no such program; name the Python of vLLM's environment"
        )
    if gateway.checkpoint is not None and not (gateway.checkpoint / "config.json").is_file():
        raise BadFile(
            f"{where}: [models.{gateway.model}] path = {str(gateway.checkpoint)!r}: no checkpoint is there"
        )
    host = urlsplit(gateway.public_url).hostname or ""
    if file.cluster.launcher == "ray" and host in _NOWHERE:
        return [
            f"warning: agents are told {gateway.public_url}/v1, which means this machine wherever they are: say"
            f" [server] public_url in {where}, or HEADGATE_PUBLIC_URL"
        ]
    return []
