"""Builds images with buildah, over a base made of Debian packages: without a Docker engine or an image registry.

Owns a storage of its own below a folder. Needs root, `buildah` and `debootstrap`. Containers have buildah's chroot isolation,
which shares the host's network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SUITE = "bookworm"
_PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class NotPossible(Exception):
    """This machine cannot build images; the message has what is missing."""


@dataclass(frozen=True, slots=True)
class Builder:
    """buildah with a storage below `folder`."""

    folder: Path

    def check(self) -> None:
        """Raises NotPossible."""
        if missing := [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]:
            raise NotPossible(
                f"{' and '.join(missing)} is not installed: apt-get install {' '.join(missing)}"
            )
        if os.geteuid() != 0:
            raise NotPossible("debootstrap and buildah's chroot isolation need root")

    def base(self, name: str) -> None:
        """Make an image named as the one that a Dockerfile builds on, with Debian's Python under both its names."""
        tree = self.folder / "base"
        if not (tree / "usr" / "bin" / "python").exists():
            shutil.rmtree(tree, ignore_errors=True)
            _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(tree))
            (tree / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # the image's Python is pip's
            shutil.copy(_CERTIFICATES, tree / _CERTIFICATES.relative_to("/"))
            (tree / "usr" / "bin" / "python").symlink_to("python3")
        container = self._buildah("from", "scratch")
        self._buildah("copy", "--quiet", container, str(tree), "/")
        self._buildah(
            "config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", container
        )
        self._buildah("commit", "--quiet", container, f"docker.io/library/{name}")
        self._buildah("rm", container)

    def build(self, dockerfile: str, name: str) -> None:
        """Build a Dockerfile of the project, whose base exists already."""
        self._buildah(
            "bud", "--pull-never", "--network", "host", "--quiet", "--file", dockerfile, "--tag", name, "."
        )

    def container(self, image: str) -> str:
        """A container of an image; `argv` runs processes in it."""
        return self._buildah("from", "--pull-never", f"localhost/{image}")

    def user(self, container: str) -> str:
        """The user that an image's processes have."""
        return self._buildah("inspect", "--format", "{{.OCIv1.Config.User}}", container)

    def argv(
        self, container: str, command: list[str], env: dict[str, str], mounts: dict[Path, str]
    ) -> list[str]:
        """The command line that runs a command in a container, as the image's user and with this machine's network."""
        variables = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
        volumes = [
            part for source, target in mounts.items() for part in ("--volume", f"{source}:{target}:ro")
        ]
        return [*self._program("run"), *variables, *volumes, container, "--", *command]

    def _program(self, verb: str) -> list[str]:
        storage = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        isolation = ("--isolation", "chroot") if verb in ("bud", "run") else ()
        return ["buildah", *storage, verb, *isolation]

    def _buildah(self, verb: str, *arguments: str) -> str:
        return _run(*self._program(verb), *arguments)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(
            f"`{' '.join(argv[:6])} ...` failed: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout.strip()
