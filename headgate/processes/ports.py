"""Free TCP ports, and addresses in URLs."""

from __future__ import annotations

import random
import socket
from collections import deque

_RANDOM = random.SystemRandom()
"""Random numbers without a seed: forked processes must not choose the same ports."""
_RESERVED: deque[socket.socket] = deque()
_MAX_RESERVED = 64
"""How many of the ports that were given out last stay held."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port of an address of this machine, which no other caller of this function gets.

    It is outside the ranges from which Linux and Ray choose ports: no process gets it by chance before it is
    used. A server can bind to it, as servers do with SO_REUSEADDR, though it is held here, by a socket that does not listen.
    Raise OSError for an address that is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as own:
        own.bind((host, 0))
    while True:
        port, reserved = _RANDOM.randrange(20_000, 32_768), socket.socket(family)
        try:
            reserved.bind((host, port))
        except OSError:
            reserved.close()
            continue
        # Another process cannot have taken the port: that was checked
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _RESERVED.append(reserved)
        if len(_RESERVED) > _MAX_RESERVED:
            _RESERVED.popleft().close()
        return port


def url_of(host: str, port: int | str) -> str:
    """Return the URL of an HTTP server: an IPv6 address stands in brackets, and the loopback for one that listens everywhere."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
