"""Ports that servers are given, and the URLs of servers."""

from __future__ import annotations

import socket

import pytest

from headgate.processes.ports import free_port, url_of


@pytest.mark.parametrize(
    ("host", "family"),
    [("127.0.0.1", socket.AF_INET), ("127.0.0.2", socket.AF_INET), ("::1", socket.AF_INET6)],
)
def test_a_free_port_is_for_a_server_and_for_no_other_search(host: str, family: socket.AddressFamily) -> None:
    """Two processes that look at the same moment must not find the same one."""
    ports = [free_port(host) for _ in range(20)]
    assert len(set(ports)) == len(ports)
    for port in ports:
        with socket.socket(family) as looking, pytest.raises(OSError, match="in use"):
            looking.bind((host, port))
        with socket.socket(family) as client, pytest.raises(ConnectionRefusedError):
            client.connect((host, port))
        with socket.create_server((host, port), family=family), socket.create_connection((host, port)):
            pass


def test_an_address_of_another_machine_has_no_free_port() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("gateway", "http://gateway:8000"),
        ("::1", "http://[::1]:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
    ],
)
def test_an_address_in_a_url(host: str, url: str) -> None:
    assert url_of(host, 8000) == url
