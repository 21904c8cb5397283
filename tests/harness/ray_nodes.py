"""Several Ray nodes on this machine (ray.cluster_utils), in a process of their own that lives as long as they do.

    python -m tests.harness.ray_nodes

The first line that it writes is the cluster's address. Then each line it reads is a JSON object, `{"add": {...}}` (what
`Cluster.add_node` takes) or `{"remove": "ID"}` (killed, without a word), and is served by a JSON object. It ends with its
input.
Ray keeps what it has read of its environment for the life of a process, and tests with other environments share theirs.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAME = "CLUSTER_TEST_NODE"


def node_of(pid: int) -> str:
    """Return the name of the Ray node that a process runs on."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((line.partition("=")[2] for line in variables if line.startswith(f"{_NAME}=")), "none")


class RayNodes:
    """Such a process, as a test uses it."""

    def __init__(self, process: subprocess.Popen[str], token: str) -> None:
        self._process = process
        self.token = token
        self.address: str = self._response()["address"]
        self._there: dict[str, str] = {}
        self._count = 0

    def add(self, name: str, **labels: str) -> None:
        """One more node with two CPUs; processes on it return its name by `node_of`.

        Each has an address of its own: a driver picks a node at its own address, and dies with it.
        """
        self._count += 1
        options = {
            "num_cpus": 2,
            "labels": labels,
            "env_vars": {_NAME: name},
            "node_ip_address": f"127.0.1.{self._count}",
        }
        self._there[name] = self._ask(add=options)["id"]

    def remove(self, name: str) -> None:
        """Kill a node."""
        self._ask(remove=self._there.pop(name))

    def remove_all(self) -> None:
        """All but the head."""
        for name in list(self._there):
            self.remove(name)

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._response()

    def _response(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the Ray nodes' process has ended; see its error output"
        return json.loads(line)


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Yield a head without labels, with token authentication on."""
    token = secrets.token_hex(32)
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "20",
        "RAY_raylet_start_wait_time_s": "300",  # on a busy machine
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **own},
        text=True,
    )
    try:
        yield RayNodes(process, token)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def main() -> None:
    """Start the nodes and wait until they are to end."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's output goes elsewhere
    from ray.cluster_utils import Cluster

    def response(**values: Any) -> None:
        print(json.dumps(values), file=responses, flush=True)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes = {}
        response(address=cluster.address)
        for line in sys.stdin:
            question = json.loads(line)
            if "add" in question:
                node = cluster.add_node(**question["add"])
                nodes[node.node_id] = node
                response(id=node.node_id)
            else:
                cluster.remove_node(nodes.pop(question["remove"]), allow_graceful=False)
                response()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
