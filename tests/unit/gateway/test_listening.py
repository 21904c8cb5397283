"""The addresses at which a gateway listens."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gateway.config.settings import ConfigError
from gateway.server import bound
from headgate.processes.ports import free_port

LACKING = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses of every host's name: as on a machine whose `localhost` has two."""
    found: list[str] = []

    def resolved(_host: str, port: int, **_options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return found


@pytest.mark.parametrize("before", [True, False])
def test_a_name_with_two_addresses_has_both_at_one_port(addresses: list[str], before: bool) -> None:
    addresses += ["127.0.0.1", "127.0.0.2"]
    addresses.insert(0 if before else 2, LACKING)
    names = [each.getsockname() for each in bound("localhost", 0, False)]
    assert [address for address, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_one_address_that_is_taken_refuses_the_start(addresses: list[str]) -> None:
    addresses += ["127.0.0.1", "127.0.0.2"]
    port = free_port()
    with socket.create_server(("127.0.0.2", port)):
        with pytest.raises(ConfigError, match="Address already in use"):
            bound("localhost", port, False)
        with socket.create_server(("127.0.0.1", port)):
            pass  # the first socket was closed


def test_a_host_without_an_address_of_this_machine_is_refused(addresses: list[str]) -> None:
    addresses += [LACKING]
    with pytest.raises(ConfigError, match=r"\[server\] host and port: cannot listen at gateway.example:80"):
        bound("gateway.example", 80, False)
