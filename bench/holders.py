"""Engines that hold real bytes and sample nothing: a process each, which receives versions by each transport of the product.

Each receives a version in addition to the one that it has (`bring`), and compares every piece with the manifest's hash. Then it
copies the bytes over those that it has (`swap`), which is what an engine is paused for.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from blake3 import blake3

from headgate.weights.manifest import MANIFEST, pieces_of
from headgate.weights.mirror import Mirror
from headgate.weights.plugin.headgate_transfer.wire import Join, Receiver
from headgate.weights.server import create_server

LIMIT_S = 600.0


class Holder:
    """An engine's process: it does one thing after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self._busy = threading.Lock()

    def call(self, what: str, *given: Any) -> Any:
        """Call the engine's method `what`, and return its result; block until then."""
        with self._busy:
            self.begin(what, *given)
            return self.end()

    def begin(self, what: str, *given: Any) -> None:
        """Start a call of the engine's method `what`."""
        self._pipe.send((what, *given))

    def end(self) -> Any:
        """Return the result of `begin`; block until then. Raise RuntimeError with the engine's error."""
        found, error = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


class _Engine:
    _mirror: Mirror

    def __init__(self) -> None:
        self._loaded: dict[str, torch.Tensor] = {}
        self._came: dict[str, torch.Tensor] = {}

    def ready(self) -> None:
        """Return once the process runs."""

    def forget(self) -> None:
        """Free all memory."""
        self._loaded, self._came = {}, {}

    def bring_folder(self, folder: Path) -> int:
        """Read a version's tensors from a folder; return the number of bytes."""
        self._came = {}
        files = json.loads((folder / MANIFEST).read_text())["files"]
        pieces = [piece for piece in pieces_of(files) if piece.file.endswith(".safetensors")]
        for name in {piece.file for piece in pieces}:
            data = torch.empty(files[name]["size"], dtype=torch.uint8)
            with (folder / name).open("rb", buffering=0) as file:
                view, at = data.numpy().data, 0
                while at < len(view):
                    at += file.readinto(view[at:])
            self._came[name] = data
        for piece in pieces:
            part = self._came[piece.file][piece.offset : piece.offset + piece.size]
            if blake3(part.numpy().data).hexdigest() != piece.blake3:
                raise ValueError(f"{piece} is not the manifest's")
        return sum(len(data) for data in self._came.values())

    def bring_transfer(self, join: Join) -> int:
        """Receive a version by collective operations; return the number of bytes."""
        received = Receiver(join, 1).result(LIMIT_S).files
        self._came = {name: image.whole() for name, image in received.items()}
        return sum(len(data) for data in self._came.values())

    def serve(self, folder: Path) -> str:
        """Serve a folder of versions, and fetch into it, as `gateway mirror` does; return the URL."""
        started: Future[str] = Future()

        async def run() -> None:
            async with Mirror(folder) as self._mirror:
                runner = web.AppRunner(create_server(self._mirror, None))
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
                await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
        return started.result(LIMIT_S)

    def fetched(self) -> int:
        """Return the bytes that were fetched from elsewhere since the last call."""
        found = sum(size for source, size in self._mirror.fetched.items() if source != "local")
        self._mirror.fetched.clear()
        return found

    def swap(self) -> float:
        """Put the received bytes in place; return the seconds. Adapters are added and replace nothing."""
        for name, data in self._came.items():
            if name not in self._loaded:
                self._loaded[name] = torch.zeros_like(data)
        began = time.perf_counter()
        for name, data in self._came.items():
            self._loaded[name].copy_(data)
        took = time.perf_counter() - began
        self._came = {}
        return took


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    engine = _Engine()
    while True:
        what, *given = pipe.recv()
        try:
            pipe.send((getattr(engine, what)(*given), ""))
        except Exception as error:
            pipe.send((None, repr(error)))
