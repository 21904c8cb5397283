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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import tests
from tests.harness.forks import LIMIT_S, fork, start_server
from tests.harness.stand_in import ADDRESS


@asynccontextmanager
async def forked(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Yield the environment under which the programs of `stand_in.FORKED` are forked. `folder` is made for it."""
    folder.mkdir()
    folder.joinpath("sitecustomize.py").write_text(
        "from tests.harness.stand_in import stand_in\n\nstand_in()\n"
    )
    # It keeps the environment that it starts with, which must not be one that names this server.
    await asyncio.to_thread(start_server)
    address = f"headgate-{uuid4().hex}"
    server = await asyncio.start_unix_server(_fork, "\0" + address, limit=2**22)
    async with server:
        yield {"PYTHONPATH": f"{folder}:{Path(tests.__file__).parents[1]}", ADDRESS: address}


async def _fork(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One program, which does not outlive its stand-in."""
    given = json.loads(await reader.readline())
    values = [given[name] for name in ("module", "arguments", "folder", "environ")]
    log = Path(f"/proc/{given['pid']}/fd/1")
    process = await asyncio.to_thread(partial(fork, _program, *values, log=log))
    writer.write(f"{process.pid}\n".encode())
    gone = asyncio.create_task(reader.read())
    ended = asyncio.create_task(asyncio.to_thread(process.join, LIMIT_S))
    await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
    process.kill()
    await ended
    gone.cancel()
    writer.write(f"{process.exitcode}\n".encode())
    writer.close()


def _program(module: str, arguments: list[str], folder: str, environ: dict[str, Any]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
