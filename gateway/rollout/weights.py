"""Checks a directory of weights against its manifest and the first version (docs/weights.md) before any engine sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.engines.tied import ties_embeddings
from gateway.errors import Unprocessable
from gateway.json_depth import loads
from gateway.rollout.tensors import INDEX, Malformed, Scan, misfit, scan, tensors_of, weight_map
from gateway.types import Probe

MANIFEST = "manifest.json"
FORMAT = 1
_TENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's weights on disk. The first version may come without a manifest, and then has no probe."""

    version: int
    path: str
    parent: int | None = None
    probe: Probe | None = None


def read_weights(path: Path, version: int, base: Path | None = None) -> Weights:
    """Reads and verifies version `version` in `path`. Reads every byte, so call it in a thread.

    `base`: the first version's checkpoint; the version must have the same tensors, all finite. Raises Unprocessable, with the
    file or the tensor and what is wrong with it.
    """
    manifest = _manifest(path)
    if manifest["version"] != version:
        raise Unprocessable(f"{path}: the manifest is of version {manifest['version']}, not {version}")
    scans = {name: _check_file(path, name, entry) for name, entry in manifest["files"].items()}
    if base is not None:
        shards = {name: scan for name, scan in scans.items() if scan is not None}
        _check_tensors(path, base, shards, manifest)
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
    files, unchanged = manifest.get("files"), manifest.get("unchanged", [])
    if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("parent"), int | None):
        raise Unprocessable(f"{path / MANIFEST} needs numbers of versions", code="bad_manifest")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise Unprocessable(f"{path / MANIFEST} needs files, each with its size", code="bad_manifest")
    if not any(name.endswith(_TENSORS) for name in files):
        raise Unprocessable(f"{path / MANIFEST} names no .safetensors file", code="bad_manifest")
    if not isinstance(unchanged, list) or not all(isinstance(name, str) for name in unchanged):
        raise Unprocessable(f"{path / MANIFEST}: `unchanged` needs names of tensors", code="bad_manifest")
    if unchanged and manifest.get("parent") is None:
        raise Unprocessable(f"{path / MANIFEST}: `unchanged` needs a parent", code="bad_manifest")
    return manifest


def _check_file(path: Path, name: str, entry: dict[str, Any]) -> Scan | None:
    """Answers what is in it, if it has tensors."""
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
    found = scan(file) if name.endswith(_TENSORS) else None
    if found is None:
        with file.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
    else:
        digest = found.sha256
    if digest != entry.get("sha256"):
        raise Unprocessable(f"{file}: its sha256 is not the manifest's", code="wrong_sha256")
    return found


def _check_tensors(path: Path, base: Path, shards: dict[str, Scan], manifest: dict[str, Any]) -> None:
    """Raises Unprocessable unless the shards have the base's tensors, each once, and nothing else that an engine would load."""
    found: dict[str, str] = {}
    for name, scanned in shards.items():
        if scanned.malformed:
            raise Unprocessable(f"{path / name}: {scanned.malformed}", code="wrong_tensors")
        if scanned.not_finite:
            tensor = scanned.not_finite[0]
            message = f"{path / name}: tensor {tensor!r} has numbers that are not finite (NaN or infinite)"
            raise Unprocessable(message, code="not_finite")
        if twice := found.keys() & scanned.tensors.keys():
            message = f"{path / name}: tensor {min(twice)!r} is in another file too"
            raise Unprocessable(message, code="wrong_tensors")
        found |= dict.fromkeys(scanned.tensors, name)
    strays = sorted(file.name for file in path.glob(f"*{_TENSORS}") if file.name not in shards)
    if strays:
        message = f"{path / strays[0]}: engines would load it, and the manifest does not name it"
        raise Unprocessable(message, code="bad_manifest")
    try:
        if (index := path / INDEX).is_file() and weight_map(index) != found:
            raise Malformed(f"{index}: its weight_map does not say where the tensors are")
        expected = tensors_of(base)
    except Malformed as error:
        raise Unprocessable(str(error), code="wrong_tensors") from error
    tensors = {name: tensor for scanned in shards.values() for name, tensor in scanned.tensors.items()}
    unchanged = manifest.get("unchanged", [])
    if expected and (wrong := misfit(expected, tensors, unchanged, tied=ties_embeddings(base))):
        raise Unprocessable(f"{path}: {wrong}", code="wrong_tensors")
