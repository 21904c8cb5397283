"""`python -m trainer.publish.sender`: the server of published versions that also sends them to engines by collective operations.

    POST /versions/7/send {"backend": "auto", "workers": 1, "timeout_s": 60, "devices": []}   returns how to join, and an "id"
    GET  /sends/ID                                            waits, and returns {"state": "sent"} or why not

in addition to the routes of `headgate.weights.server`. It is a separate process, so that no transfer delays the trainer and no
peer that dies in the middle of one ends it. Each transfer has a group and a port of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import itertools
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from headgate.errors import (
    GatewayError,
    NotFound,
    Unprocessable,
)
from headgate.weights.manifest import (
    MANIFEST,
    BadManifest,
    plan_of,
)
from headgate.weights.mirror import Mirror
from headgate.weights.plugin.headgate_transfer.devices import Device
from headgate.weights.plugin.headgate_transfer.groups import BACKENDS, TransferError
from headgate.weights.plugin.headgate_transfer.wire import Sender
from headgate.weights.server import create_server
from trainer.publish.shown import listing_for

log = logging.getLogger(__name__)
_AT_ONCE = 16
_REMEMBERED = 256
_LONGEST_S = 3600.0
_MOST_WORKERS = 4096


class Sends:
    """The transfers of one process. Invariant: at most `_AT_ONCE` run at a time."""

    def __init__(self, mirror: Mirror, host: str) -> None:
        """`host`: the address of this machine by which engines reach it."""
        self._mirror, self._host = mirror, host
        self._ids = itertools.count(1)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._not_opened = set[int]()
        """Versions that the trainer shows, and an engine could not open."""
        self._threads = ThreadPoolExecutor(_AT_ONCE, "send")
        """Threads for transfers alone: each waits for its peers, and none may wait for another's end."""

    def add_to(self, app: web.Application) -> None:
        """Add the routes, before the application starts."""
        app.router.add_post(r"/versions/{version:\d+}/send", self._send)
        app.router.add_get(r"/sends/{id:\d+}", self._wait)

    async def _send(self, request: web.Request) -> web.Response:
        wanted = _parsed(await request.read())
        version = int(request.match_info["version"])
        folder = self._mirror.versions().get(version)
        if folder is None:
            raise NotFound(f"version {version} is not on this server", code="no_version")
        if sum(not task.done() for task in self._running.values()) >= _AT_ONCE:
            raise GatewayError(f"{_AT_ONCE} transfers run already: try again later", code="busy")
        try:
            manifest = json.loads(await asyncio.to_thread((folder / MANIFEST).read_bytes))
            plan = plan_of(manifest["files"])
            shown = None
            if version not in self._not_opened:
                shown = await asyncio.to_thread(listing_for, folder, wanted.backend, wanted.devices)
            sender = await asyncio.to_thread(
                Sender,
                folder,
                plan,
                wanted.backend,
                self._host,
                wanted.workers,
                wanted.timeout_s,
                devices=wanted.devices,
                shown=shown,
            )
        except (BadManifest, TransferError, OSError, RuntimeError) as error:
            raise Unprocessable(f"version {version} cannot be sent: {error}", code="cannot_send") from error
        name = str(next(self._ids))
        self._forget()
        self._running[name] = asyncio.get_running_loop().run_in_executor(
            self._threads, self._sent, sender, version, shown is not None
        )
        chosen = {"backend": sender.backend, "lanes": sender.lanes, "shown": shown is not None}
        return web.json_response({"id": name, **chosen, "address": self._host, "port": sender.port})

    def _sent(self, sender: Sender, version: int, shown: bool) -> None:
        try:
            sender.send()
        except TransferError as error:
            if shown:  # containers, for one, may see the same GPU and not each other's memory
                log.warning(
                    "version %d is sent from now on, as its memory was not opened: %s", version, error
                )
                self._not_opened.add(version)
            raise

    def _forget(self) -> None:
        for name in [name for name, task in self._running.items() if task.done()][:-_REMEMBERED]:
            del self._running[name]

    async def _wait(self, request: web.Request) -> web.Response:
        task = self._running.get(request.match_info["id"])
        if task is None:
            raise NotFound("the transfer is unknown: this server was restarted", code="no_transfer")
        await asyncio.wait({task})
        error = task.exception()
        return web.json_response({"state": "failed", "why": str(error)} if error else {"state": "sent"})


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The body of a request to send."""

    backend: str
    workers: int
    timeout_s: float
    devices: list[Device]
    """The workers' (`headgate_transfer.devices`); empty if they are not known."""


def _parsed(body: bytes) -> _Wanted:
    try:
        values = json.loads(body)
        devices = [
            {"gpu": str(one["gpu"]), "memory": str(one["memory"])} for one in values.get("devices", ())
        ]
        found = _Wanted(
            str(values["backend"]), int(values["workers"]), float(values["timeout_s"]), list(devices)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            "the body needs backend, workers and timeout_s; devices, if given, is a list of gpu and memory"
        )
        raise Unprocessable(message, code="invalid_value") from error
    if (
        found.backend not in ("auto", *BACKENDS)
        or not 1 <= found.workers <= _MOST_WORKERS
        or not 0 < found.timeout_s <= _LONGEST_S
    ):
        message = f"backend is auto or one of {BACKENDS}, workers 1 to {_MOST_WORKERS}, timeout_s up to {_LONGEST_S:g}"
        raise Unprocessable(message, code="invalid_value")
    return found


def create_sender(mirror: Mirror, key: str | None, host: str) -> web.Application:
    """Return the server of a mirror that is open. `host`: the address of this machine by which engines reach it."""
    app = create_server(mirror, key)
    Sends(mirror, host).add_to(app)
    return app


async def _serve(options: argparse.Namespace, key: str | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Mirror(options.dir, key) as mirror:
        runner = web.AppRunner(create_sender(mirror, key, options.engine_facing_host), access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, options.host, options.port).start()
            await stop.wait()
        finally:
            await runner.cleanup()


def main(args: list[str] | None = None) -> None:
    """Serve until a signal arrives."""
    parser = argparse.ArgumentParser(prog="python -m trainer.publish.sender", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the directory of versions")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--engine-facing-host", required=True, help="this machine's address, as engines reach it"
    )
    options = parser.parse_args(args)
    key = os.environ.get("HEADGATE_WEIGHTS_KEY") or None
    if key is None and not _is_loopback(options.host):
        parser.error("any client that reaches --host could read the weights: set HEADGATE_WEIGHTS_KEY")
    asyncio.run(_serve(options, key))
    # a thread may still wait for a lost peer; its deadline does not matter any more
    sys.stdout.flush()
    os._exit(0)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
