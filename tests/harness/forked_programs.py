"""Programs that others start (torchrun, `scheduler run`, a trainer), forked from a process that has imported everything.

A program that starts `python -m MODULE` gets a stand-in (`stand_in`), which has its process id and ends as the program does;
the program is forked here, so that a start costs no seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from uuid import uuid4

import tests
from tests.harness.forks import LIMIT_S, fork, forks
from tests.harness.stand_in import ADDRESS


def _nothing() -> None:
    pass


def left_to_forks(folder: Path) -> dict[str, str]:
    """Make a folder; the environment under which programs are left to `forking`, if its variable is there too."""
    folder.mkdir()
    folder.joinpath("sitecustomize.py").write_text(
        "from tests.harness.stand_in import stand_in\n\nstand_in()\n"
    )
    return {"PYTHONPATH": f"{folder}:{Path(tests.__file__).parents[1]}"}


@asynccontextmanager
async def forking(first: Callable[[], None] = _nothing) -> AsyncIterator[dict[str, str]]:
    """Forks the programs of `stand_in.FORKED` that start under the environment that is given.

    `first`: a function of a module, which each forked process calls before its program.
    """
    # It keeps the environment that it starts with, which must not be one that names this server.
    forks()
    await asyncio.to_thread(forkserver.ensure_running)
    address = f"headgate-{uuid4().hex}"
    server = await asyncio.start_unix_server(partial(_fork, first), "\0" + address, limit=2**22)
    async with server:
        yield {ADDRESS: address}


@asynccontextmanager
async def forked(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Yield the environment under which programs are forked. `folder` is made for it."""
    environ = left_to_forks(folder)
    async with forking() as more:
        yield environ | more


async def _fork(
    first: Callable[[], None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One program, which does not outlive its stand-in."""
    given = json.loads(await reader.readline())
    values = [given[name] for name in ("module", "arguments", "folder", "environ")]
    log = Path(f"/proc/{given['pid']}/fd/1")
    process = await asyncio.to_thread(partial(fork, _program, first, *values, log=log))
    writer.write(f"{process.pid}\n".encode())
    gone = asyncio.create_task(reader.read())
    ended = asyncio.create_task(asyncio.to_thread(process.join, LIMIT_S))
    await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
    process.kill()
    await ended
    gone.cancel()
    writer.write(f"{process.exitcode}\n".encode())
    writer.close()


def _program(
    first: Callable[[], None], module: str, arguments: list[str], folder: str, environ: dict[str, Any]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    first()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
