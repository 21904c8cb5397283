"""`/admin/v1/settings`, `/admin/v1/logs`: the settings of a run's programs as they were used, and the ends of their logs.

For the root key only: they belong to no project.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from gateway.api.access import Access, Admin
from gateway.api.admin.admin_route import admin_router
from gateway.observe.run_files import MOST_BYTES, Log, RunFiles, missing_logs
from gateway.store import trainer_steps
from gateway.store.holder import folder_of
from headgate.errors import NotFound
from headgate.used_settings import used_settings

router = admin_router("Runs")


@router.get("/settings")
async def get_settings(access: Admin) -> dict[str, Any]:
    """Return the settings of gateway and trainer by program: a row for each with its default, without secrets.

    `why` states why there are none. Those of a trainer, and of a recorded run, are from the file that the program wrote when it
    started.
    """
    files = await _files(access)
    gateway = access.gateway
    if gateway.recorded is None:
        found: tuple[Any, str] = {"settings": used_settings(gateway.settings), "at": None, "path": None}, ""
    else:
        found = await asyncio.to_thread(files.settings_of, "gateway")
    trained = await asyncio.to_thread(files.settings_of, "trainer")
    both = {"gateway": found, "trainer": trained}
    none: dict[str, Any] = {"settings": [], "at": None, "path": None}
    return {
        "programs": [
            {"program": name, **(values or none), "why": why} for name, (values, why) in both.items()
        ]
    }


@router.get("/logs")
async def list_logs(access: Admin) -> dict[str, Any]:
    """Return the logs of the run on this machine, and the programs of which there is none (`missing`)."""
    files = await _files(access)
    logs = await asyncio.to_thread(files.logs)
    return {"logs": [_described(log) for log in logs], "missing": missing_logs(logs, files)}


@router.get("/logs/tail")
async def get_log(
    access: Admin,
    log: Annotated[str, Query(max_length=4096, description="The path of a log of the list.")],
    limit: Annotated[int, Query(ge=1024, le=MOST_BYTES, description="Bytes of its end.")] = 256 * 1024,
) -> dict[str, Any]:
    """Return the end of a log, in whole lines. Only a log of the list can be read."""
    files = await _files(access)
    try:
        found = await asyncio.to_thread(files.tail, log, limit)
    except OSError as error:
        raise NotFound(
            f"{log} cannot be read: {error.strerror or error}", code="no_log", param="log"
        ) from error
    if found is None:
        raise NotFound("the run has no such log; /admin/v1/logs lists them", code="no_log", param="log")
    return {**_described(found[0]), "text": found[1]}


def _described(log: Log) -> dict[str, Any]:
    return {**asdict(log), "path": str(log.path)}


async def _files(access: Access) -> RunFiles:
    """Return where the run's files are. Raise NotFound for the key of a project."""
    gateway = access.gateway
    if not access.reach.everything:
        raise NotFound("no route has this path", code="not_found")
    reported = await gateway.database.read(trainer_steps.folders)
    own = [*gateway.run_folders]
    if (folder := folder_of(gateway.settings.store.url)) is not None:
        own += [folder, folder / "trainer"]
    settings = gateway.settings if gateway.recorded is None else None
    return await asyncio.to_thread(RunFiles.of, own, map(Path, reported), settings)
