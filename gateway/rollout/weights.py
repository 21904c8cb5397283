"""Checks a directory of weights against its manifest (docs/weights.md) before any engine sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import Unprocessable
from gateway.json_depth import loads
from gateway.types import Probe

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's weights on disk. The first version may come without a manifest, and then has no probe."""

    version: int
    path: str
    parent: int | None = None
    probe: Probe | None = None


def read_weights(path: Path, version: int) -> Weights:
    """Reads and verifies version `version` in `path`; reads every byte, so call it from a thread.

    Raises Unprocessable, with the file and what is wrong with it.
    """
    manifest = _manifest(path)
    if manifest["version"] != version:
        raise Unprocessable(f"{path}: the manifest is of version {manifest['version']}, not {version}")
    for name, entry in manifest["files"].items():
        _check_file(path, name, entry)
    probe = manifest.get("probe")
    try:
        parsed = Probe.from_json(probe) if probe else None
    except (KeyError, TypeError, ValueError) as error:
        raise Unprocessable(
            f"{path}: the manifest's probe is not usable: {error}", code="bad_probe"
        ) from error
    return Weights(version, str(path.resolve()), manifest.get("parent"), parsed)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = loads((path / MANIFEST).read_text())
    except OSError as error:
        raise Unprocessable(f"{path / MANIFEST}: {error.strerror}", code="no_manifest") from error
    except ValueError as error:
        raise Unprocessable(f"{path / MANIFEST} is not JSON: {error}", code="bad_manifest") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Unprocessable(f"{path / MANIFEST}: this build reads format {FORMAT}", code="bad_manifest")
    files = manifest.get("files")
    if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("parent"), int | None):
        raise Unprocessable(f"{path / MANIFEST} needs numbers of versions", code="bad_manifest")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise Unprocessable(f"{path / MANIFEST} needs files, each with its size", code="bad_manifest")
    if not any(name.endswith(".safetensors") for name in files):
        raise Unprocessable(f"{path / MANIFEST} names no .safetensors file", code="bad_manifest")
    return manifest


def _check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    file = path / name
    if file.resolve().parent != path.resolve():
        raise Unprocessable(f"{path}: the manifest names a file outside it: {name!r}", code="bad_manifest")
    if not file.is_file():
        raise Unprocessable(f"{file}: named by the manifest, but missing", code="truncated_weights")
    size = file.stat().st_size
    if size != entry.get("size"):
        raise Unprocessable(
            f"{file}: {size} bytes, the manifest says {entry.get('size')}", code="truncated_weights"
        )
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    if digest != entry.get("sha256"):
        raise Unprocessable(f"{file}: its sha256 is not the manifest's", code="wrong_sha256")
