"""The Ray actor that holds a child process, tested without Ray."""

from __future__ import annotations

import socket

import pytest

from scheduler.cluster.ray_actor import NodeActor


def test_a_node_reserves_a_free_port_for_the_server_that_requested_it() -> None:
    actor = NodeActor()
    port = actor.free_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
