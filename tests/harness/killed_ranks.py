"""Ranks that a launcher starts, and that kill themselves with SIGKILL where a plan says.

The launcher's command stays what a user would give. Every Python process that inherits the environment of `planned` imports a
`sitecustomize`, which arms those that are ranks; with that of `forking` too, it leaves them to processes that are forked here.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from uuid import uuid4

import tests
from tests.harness import trainer_process
from tests.harness.forks import LIMIT_S, forks, keep_what_is_loaded, say_to
from tests.harness.stand_in import ADDRESS
from tests.harness.trainer_process import POINTS, RANKS

_FOLDER = "HEADGATE_TEST_KILLED_RANKS"
Victim = tuple[int, str]
"""A rank and the point at which it dies, one for each life of a run."""


def planned(folder: Path, victims: Sequence[Victim]) -> dict[str, str]:
    """Writes a plan; the environment under which ranks heed it."""
    environ = left_to_forks(folder)
    with folder.joinpath("sitecustomize.py").open("a") as file:
        file.write("from tests.harness import killed_ranks\n\nkilled_ranks.arm()\n")
    folder.joinpath("plan.json").write_text(json.dumps(victims))
    return {**environ, _FOLDER: str(folder)}


def left_to_forks(folder: Path) -> dict[str, str]:
    """Makes a folder; the environment under which programs are left to `forking`, if its variable is there too."""
    folder.mkdir()
    folder.joinpath("sitecustomize.py").write_text(
        "from tests.harness.stand_in import stand_in\n\nstand_in()\n"
    )
    return {"PYTHONPATH": f"{folder}:{Path(tests.__file__).parents[1]}"}


def happened(folder: Path) -> list[Victim]:
    """The ranks that were killed as planned, in order."""
    noted = sorted(folder.glob("died-*"), key=lambda path: int(path.name.removeprefix("died-")))
    return [(int(rank), point) for rank, _, point in (path.read_text().partition(" ") for path in noted)]


def arm() -> None:
    """Makes this process die where the plan says, if it is a rank, and no child of one, whose life it is."""
    if "RANK" not in os.environ or not {"trainer.cli"} & {*sys.orig_argv, *sys.argv[:1]}:
        return
    folder, rank = Path(os.environ[_FOLDER]), int(os.environ["RANK"])
    with folder.joinpath(f"lives-{rank}").open("a") as file:
        life = file.tell()
        file.write("x")
    victims = json.loads(folder.joinpath("plan.json").read_text())
    if life >= len(victims) or victims[life][0] != rank:
        return
    name, die = victims[life][1], trainer_process.die

    def noted() -> None:
        folder.joinpath(f"died-{life}").write_text(f"{rank} {name}")
        die()

    trainer_process.die = noted
    trainer_process.arm({**POINTS, **RANKS}[name])


@asynccontextmanager
async def forking() -> AsyncIterator[dict[str, str]]:
    """Forks what a launcher starts (`stand_in.FORKED`) under the environment that is given, so that a start costs no seconds."""
    # It keeps the environment that it starts with, which must not be one that names this server.
    forks()
    await asyncio.to_thread(forkserver.ensure_running)
    address = f"headgate-{uuid4().hex}"
    server = await asyncio.start_unix_server(_fork, "\0" + address, limit=2**22)
    async with server:
        yield {ADDRESS: address}


@asynccontextmanager
async def forked(folder: Path) -> AsyncIterator[dict[str, str]]:
    """The environment under which programs are forked, and nobody is killed."""
    environ = left_to_forks(folder)
    async with forking() as more:
        yield environ | more


async def _fork(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One program, which does not outlive its stand-in."""
    told = json.loads(await reader.readline())
    process = forks().Process(target=_program, kwargs=told, daemon=True)
    await asyncio.to_thread(process.start)
    writer.write(f"{process.pid}\n".encode())
    gone = asyncio.create_task(reader.read())
    ended = asyncio.create_task(asyncio.to_thread(process.join, LIMIT_S))
    await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
    process.kill()
    await ended
    gone.cancel()
    writer.write(f"{process.exitcode}\n".encode())
    writer.close()


def _program(module: str, arguments: list[str], folder: str, pid: int, environ: dict[str, Any]) -> None:
    keep_what_is_loaded()
    say_to(Path(f"/proc/{pid}/fd/1"))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    arm()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
