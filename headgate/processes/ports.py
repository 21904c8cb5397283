"""Free TCP ports, and addresses in URLs."""

from __future__ import annotations

import random
import socket
from collections import deque

_RANDOM = random.SystemRandom()
"""Random numbers without a seed: forked processes must not choose the same ports."""
_HELD: deque[socket.socket] = deque()
_MOST_HELD = 64
"""Ports that were given away last, and are held until so many more were."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port of an address of this machine, which no other caller of this function gets.

    It is of none of the ranges from which Linux and Ray give ports to whoever asks for any: nobody has it by chance before it is
    used. A server can bind to it, as servers do with SO_REUSEADDR, though it is held here, by a socket that does not listen.
    Raise OSError for an address that is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as own:
        own.bind((host, 0))
    while True:
        port, held = _RANDOM.randrange(20_000, 32_768), socket.socket(family)
        try:
            held.bind((host, port))
        except OSError:
            held.close()
            continue
        # Another process cannot have taken the port: that was checked
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _HELD.append(held)
        if len(_HELD) > _MOST_HELD:
            _HELD.popleft().close()
        return port


def url_of(host: str, port: int | str) -> str:
    """Return the URL of an HTTP server: an IPv6 address stands in brackets, and the loopback for one that listens everywhere."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
