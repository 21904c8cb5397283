"""Checks a directory of weights against its manifest and the first version (docs/topics/weights.md) before any engine sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from gateway.engines.tied_embeddings import ties_embeddings
from headgate.errors import UnusableVersion
from headgate.json_depth import loads
from headgate.types import Probe
from headgate.weights import adapter as adapters
from headgate.weights.manifest import MANIFEST, READABLE, TENSORS, difference
from headgate.weights.tensors import INDEX, Malformed, Scan, misfit, tensors_of, weight_map


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's weights on disk. Only the first version may have no manifest."""

    version: int
    path: str
    parent: int | None = None
    probe: Probe | None = None
    source: str = ""
    """The server that it was fetched from; empty for one that was published as a path, and after a restart."""
    adapter: str = ""
    """The name by which engines know the version, if it is an adapter on top of the first version's weights; empty: it is whole
    weights. It stands for the version's bytes, so no two versions of any run share one."""


def read_weights(
    path: Path, version: int, base: Path | None = None, max_lora_rank: int | None = None
) -> Weights:
    """Read and verify version `version` in `path`. Reads every byte, so call it in a thread.

    `base`: the first version's checkpoint; the version must have the same tensors, all finite. `max_lora_rank`: versions are
    adapters for it instead, of at most this rank. Raise UnusableVersion, with the file or the tensor and what is wrong
    with it.
    """
    manifest = _manifest(path, version)
    check_form(path, manifest["files"], max_lora_rank)
    scans = {name: _check_file(path, name, entry) for name, entry in manifest["files"].items()}
    if base is not None:
        shards = {name: scan for name, scan in scans.items() if scan is not None}
        _check_tensors(path, base, shards, manifest, max_lora_rank)
    return _weights(path, manifest)


def known_weights(path: Path, version: int, max_lora_rank: int | None = None) -> Weights:
    """Read the manifest of a version that `read_weights` has verified before, and compare the sizes of its files.

    Raise UnusableVersion.
    """
    manifest = _manifest(path, version)
    if version:
        check_form(path, manifest["files"], max_lora_rank)
    for name, entry in manifest["files"].items():
        _check_size(path, name, entry)
    return _weights(path, manifest)


def _weights(path: Path, manifest: dict[str, Any]) -> Weights:
    probe = manifest.get("probe")
    try:
        parsed = Probe.from_json(probe) if probe else None
        if parsed and manifest.get("parent") is not None and not parsed.parent_logprobs:
            raise ValueError("a version with a parent needs `parent_logprobs`")
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableVersion(
            f"{path}: the manifest's probe is not usable: {error}", code="bad_probe"
        ) from error
    adapter = f"v{manifest['version']}-{_digest(path)}" if adapters.CONFIG in manifest["files"] else ""
    return Weights(manifest["version"], str(path.resolve()), manifest.get("parent"), parsed, adapter=adapter)


def require_probe(weights: Weights) -> None:
    """Raise UnusableVersion if a version has no probe: no engine could show that it computes with its weights."""
    if weights.probe is None:
        message = (
            f"{weights.path}: the manifest of version {weights.version} has no `probe`: write a few token sequences with their"
            " log-probabilities (docs/topics/weights.md)"
        )
        raise UnusableVersion(message, code="no_probe")


def _digest(path: Path) -> str:
    """Stand for every byte of a version, whose hashes its manifest has."""
    return blake3((path / MANIFEST).read_bytes()).hexdigest()[:16]


def check_form(path: Path, files: Iterable[str], max_lora_rank: int | None) -> None:
    """Raise UnusableVersion if a version is an adapter where engines load whole weights, or the other way round."""
    is_adapter = adapters.CONFIG in files
    if is_adapter and max_lora_rank is None:
        message = f"{path}: this version is an adapter: set [engine] transport = 'lora' in the gateway"
        raise UnusableVersion(message, code="wrong_transport")
    if max_lora_rank is not None and not is_adapter:
        message = (
            f"{path}: this version is not an adapter, and [engine] transport = 'lora' needs one: set [weights]"
            " transport = 'lora' in the trainer, or [engine] transport = 'files' here"
        )
        raise UnusableVersion(message, code="wrong_transport")


def _manifest(path: Path, version: int) -> dict[str, Any]:
    try:
        manifest = loads((path / MANIFEST).read_text())
    except OSError as error:
        raise UnusableVersion(f"{path / MANIFEST}: {error.strerror}", code="no_manifest") from error
    except ValueError as error:
        raise UnusableVersion(f"{path / MANIFEST} is not JSON: {error}", code="bad_manifest") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise UnusableVersion(f"{path / MANIFEST}: this build reads the formats {known}", code="bad_manifest")
    files, unchanged = manifest.get("files"), manifest.get("unchanged", [])
    if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("parent"), int | None):
        raise UnusableVersion(
            f"{path / MANIFEST}: `version` must be an integer, `parent` too or null", code="bad_manifest"
        )
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise UnusableVersion(f"{path / MANIFEST}: `files` must be an object of objects", code="bad_manifest")
    if not any(name.endswith(TENSORS) for name in files):
        raise UnusableVersion(f"{path / MANIFEST}: `files` has no .safetensors file", code="bad_manifest")
    if not isinstance(unchanged, list) or not all(isinstance(name, str) for name in unchanged):
        raise UnusableVersion(
            f"{path / MANIFEST}: `unchanged` must be a list of tensor names", code="bad_manifest"
        )
    if unchanged and manifest.get("parent") is None:
        raise UnusableVersion(f"{path / MANIFEST}: `unchanged` needs `parent`", code="bad_manifest")
    if manifest["version"] != version:
        message = f"{path}: the manifest is of version {manifest['version']}, not {version}"
        raise UnusableVersion(message, code="bad_manifest")
    return manifest


def _check_size(path: Path, name: str, entry: dict[str, Any]) -> Path:
    """Return the file of an entry. Raise UnusableVersion if it is not there, is elsewhere, or has another size."""
    file = path / name
    if file.resolve().parent != path.resolve():
        raise UnusableVersion(f"{path}: the manifest names a file outside it: {name!r}", code="bad_manifest")
    if not file.is_file():
        raise UnusableVersion(f"{file}: named by the manifest, but missing", code="truncated_weights")
    size = file.stat().st_size
    if size != entry.get("size"):
        raise UnusableVersion(
            f"{file}: {size} bytes, the manifest has {entry.get('size')}", code="truncated_weights"
        )
    return file


def _check_file(path: Path, name: str, entry: dict[str, Any]) -> Scan | None:
    """Check a file against the manifest. Return its tensors, if it has some."""
    file = _check_size(path, name, entry)
    wrong, found = difference(file, entry)
    if wrong:
        raise UnusableVersion(f"{file}: {wrong}", code="wrong_sha256" if "sha256" in entry else "wrong_hash")
    return found


def _check_tensors(
    path: Path, base: Path, shards: dict[str, Scan], manifest: dict[str, Any], max_lora_rank: int | None
) -> None:
    """Raise UnusableVersion unless the shards have the base's tensors, or an adapter's, each once, and nothing else that an
    engine would load."""
    found: dict[str, str] = {}
    for name, scanned in shards.items():
        if scanned.malformed:
            raise UnusableVersion(f"{path / name}: {scanned.malformed}", code="wrong_tensors")
        if scanned.not_finite:
            tensor = scanned.not_finite[0]
            message = f"{path / name}: tensor {tensor!r} has numbers that are not finite (NaN or infinite)"
            raise UnusableVersion(message, code="not_finite")
        if twice := found.keys() & scanned.tensors.keys():
            message = f"{path / name}: tensor {min(twice)!r} is in two files"
            raise UnusableVersion(message, code="wrong_tensors")
        found |= dict.fromkeys(scanned.tensors, name)
    strays = sorted(file.name for file in path.glob(f"*{TENSORS}") if file.name not in shards)
    if strays:
        message = f"{path / strays[0]}: the manifest does not name this file, which engines would load"
        raise UnusableVersion(message, code="bad_manifest")
    try:
        if (index := path / INDEX).is_file() and weight_map(index) != found:
            raise Malformed(f"{index}: its weight_map does not locate the tensors")
        expected = tensors_of(base)
    except Malformed as error:
        raise UnusableVersion(str(error), code="wrong_tensors") from error
    tensors = {name: tensor for scanned in shards.values() for name, tensor in scanned.tensors.items()}
    unchanged = manifest.get("unchanged", [])
    if not expected:
        return
    if max_lora_rank is not None:
        wrong = adapters.misfit(_adapter_config(path), expected, tensors, max_lora_rank)
    else:
        wrong = misfit(expected, tensors, unchanged, tied=ties_embeddings(base))
    if wrong:
        raise UnusableVersion(f"{path}: {wrong}", code="wrong_tensors")


def _adapter_config(path: Path) -> Any:
    try:
        return loads((path / adapters.CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UnusableVersion(f"{path / adapters.CONFIG}: {error}", code="wrong_tensors") from error
