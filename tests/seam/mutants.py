"""Processes that send requests on in a wrong way, each in one; a fuzzer that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import aiohttp

from gateway.api.middleware import forward, hop
from gateway.tenancy.projects import Projects, Reach
from tests.seam.checker import Report


@dataclass(frozen=True, slots=True)
class Mutant:
    """One way to be wrong."""

    name: str
    wrong: tuple[str, ...]
    """Findings that may be counted before the right one."""
    put_in: Callable[[], AbstractContextManager[Any]]

    def caught_by(self, report: Report) -> bool:
        """Returns whether the checker named the right fault."""
        return any(report.counts[count] for count in self.wrong)


@contextmanager
def _body_dropped() -> Iterator[None]:
    """The length of a body goes on, and the body does not."""
    request = aiohttp.ClientSession.request

    def asking(self: aiohttp.ClientSession, method: str, url: Any, **more: Any) -> Any:
        if method in ("GET", "HEAD", "DELETE") and more.get("data") is not None:
            length = str(len(more.pop("data").getvalue()))
            more["headers"] = [*more["headers"], ("Content-Length", length)]
        return request(self, method, url, **more)

    with mock.patch.object(aiohttp.ClientSession, "request", asking):
        yield


def _keys_unchecked() -> AbstractContextManager[Any]:
    """Whoever asks for something of the admin API is passed on."""

    def reached(projects: Projects, _: Any) -> Reach:
        return projects.root

    return mock.patch.object(forward, "reached", reached)


def _headers_copied() -> AbstractContextManager[Any]:
    """Copies the headers of the client's connection to the other one."""

    def everything(headers: hop.Headers, _: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in headers if name != b"host"]

    return mock.patch.object(hop, "end_to_end", everything)


MUTANTS = (
    Mutant("a length without its body", ("crossed", "smuggled", "wrong"), _body_dropped),
    Mutant("keys are not checked", ("unchecked",), _keys_unchecked),
    Mutant("headers of a connection are copied", ("crossed", "smuggled", "wrong", "lost"), _headers_copied),
)
