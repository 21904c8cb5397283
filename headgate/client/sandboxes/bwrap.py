"""bubblewrap: namespaces of the kernel, without root and without a daemon.

The agent sees the system's programs, headgate's Python, the current folder, and what `--sandbox-read` names, all read only.
Memory, CPU and processes are counted from outside (`usage`), since only a cgroup's owner can bound them for many processes.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headgate.client.sandboxes.base import (
    ENTRYPOINT,
    HOME,
    MIB,
    SOCKET_FOLDER,
    Contained,
    Limits,
)

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
_ETC = (
    "alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "nsswitch.conf", "passwd", "pki", "ssl",
)  # fmt: skip
"""Files that programs look for; the rest of `/etc` may be secret."""
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
_SHM_MIB = 64


class Bubblewrap:
    """`bwrap`, as it is found in PATH."""

    enforces_limits = False

    def __init__(self, limits: Limits, read: Sequence[Path] = ()) -> None:
        self.limits = limits
        self._read = read

    def trial(self, socket_folder: Path) -> list[str]:
        return self.command(Contained("trial", ["true"], (), socket_folder))

    def refusal(self, output: str) -> str:
        if shutil.which("bwrap") is None:
            return "--sandbox bwrap needs bubblewrap, and there is no bwrap in PATH: install the package bubblewrap"
        return (
            f"--sandbox bwrap cannot contain agents on this machine: {output}; where user namespaces are forbidden (sysctl"
            " kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns, a container without"
            " them), use --sandbox docker:IMAGE"
        )

    def command(self, agent: Contained) -> list[str]:
        options = [
            "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL",
            *self._environment(agent.variables),
            "--proc", "/proc",
            "--dev", "/dev", "--size", str(_SHM_MIB * MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev",
            "--size", str(self.limits.disk_mib * MIB), "--tmpfs", HOME,
            *self._folders(),
            "--ro-bind", str(agent.socket_folder), SOCKET_FOLDER,
            "--remount-ro", "/",
            "--chdir", str(Path.cwd()),
        ]  # fmt: skip
        return [
            "bwrap",
            *options,
            "--",
            sys.executable,
            "-I",
            *ENTRYPOINT,
            *agent.argv,
        ]

    def removal(self, name: str) -> list[str]:
        return []

    def reason(self, status: int) -> str:
        return ""

    def _environment(self, variables: Sequence[str]) -> Iterator[str]:
        """All but a few variables are unset: those of the driver hold its own keys."""
        for name in sorted({*os.environ} - {*_KEPT, *variables}):
            yield from ("--unsetenv", name)
        yield from ("--setenv", "HOME", HOME)

    def _folders(self) -> Iterator[str]:
        """Links of the system stay links, as `/bin` of a merged `/usr`."""
        for name in _SYSTEM:
            path = Path(name)
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), name)
            elif path.exists():
                yield from ("--ro-bind", name, name)
        for name in _ETC:
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        # A folder within another would come after it in any case: mounts are made in this order.
        for path in sorted({Path(sys.base_prefix), Path(sys.prefix), Path.cwd(), *self._read}):
            yield from ("--ro-bind", str(path), str(path))
