"""Examines the database and the bus: whether they answer, the form of the tables, the clock."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from gateway.bus.opening import open_bus
from gateway.doctor.finding import Finding
from gateway.doctor.host import writable
from gateway.errors import Unavailable
from gateway.render.tool_alarm import WORDS
from gateway.sections import StoreSettings
from gateway.settings import ConfigError, Settings
from gateway.store import clock, turns
from gateway.store.connections import connect, driver, without_password
from gateway.store.holder import used_by
from gateway.store.schema import check_form

_SKEW_S = 1.0
_DAY_S = 86_400.0


async def examine_database(settings: Settings) -> list[Finding]:
    """Looks at the tables' revision and at the database's clock."""
    return await asyncio.to_thread(_examine_database, settings.store)


def _examine_database(store: StoreSettings) -> list[Finding]:
    url, shown = driver(store.url), without_password(store.url)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
        return [_unmade(shown, Path(str(url.database)).absolute().parent)]
    if url.get_backend_name() == "sqlite" and not writable(Path(str(url.database)), file=True):
        what = f"{shown}: this user cannot write to it"
        return [Finding("problem", what, "run as its owner, or set another [store] url")]
    try:
        check_form(store)
    except ConfigError as error:
        mend = "run `gateway migrate`, or start the gateway on it once; or mend [store] url"
        return [Finding("problem", str(error), mend)]
    found = [Finding("ok", f"{shown}: the tables have this build's form")]
    if (used := used_by(store.url)) is not None:
        found.append(Finding("problem", *used))
    engine = connect(store.url, 1)
    try:
        with engine.connect() as connection:
            before = time.time()
            theirs = clock.now(connection)
            skew = min(theirs - before, 0.0) + max(theirs - time.time(), 0.0)  # none while the answer took
            faulty = turns.tool_faults_since(connection, time.time() - _DAY_S)
    finally:
        engine.dispose()
    found += [
        Finding(
            "warning",
            f"{count} replies of the last day: {WORDS[fault]}",
            "gateway episodes why EPISODE shows which",
        )
        for fault, count in faulty.most_common()
    ]
    if abs(skew) > _SKEW_S:
        what = f"the database's clock is {skew:+.1f} s from this machine's"
        found.append(Finding("warning", what, "synchronise both machines' clocks (NTP)"))
    return found


def _unmade(shown: str, folder: Path) -> Finding:
    """Look whether a database that is not there yet can be made in a folder, which may not be there either."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if there.is_dir() and writable(there):
        return Finding("ok", f"{shown}: there is no database yet; the first start makes it")
    what = f"{shown}: there is no database, and none can be made: {there} is not a folder that this user can write to"
    return Finding("problem", what, "set [store] url to a folder that the gateway's user can write to")


async def examine_bus(settings: Settings) -> list[Finding]:
    """Asks for a key that nobody has."""
    scheme = settings.bus.url.partition("://")[0]
    if scheme == "memory":
        return [Finding("ok", "in memory: one gateway process needs no Redis")]
    bus = open_bus(settings.bus)
    try:
        await bus.get("doctor")
    except Unavailable as error:
        return [Finding("problem", f"[bus] url: {error}", "start Redis, or mend the URL and its password")]
    finally:
        await bus.close()
    return [Finding("ok", "Redis answers")]
