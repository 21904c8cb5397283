"""A version's manifest (docs/topics/weights.md): each file by its size and BLAKE3, each piece of a tensor by its own.

The trainer writes format 2; manifests of format 1, with a SHA-256 for each file, are read too. Invariant: the pieces of a file
cover each of its bytes once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headgate.types import Probe
from headgate.weights.tensors import (
    PIECE,
    Scan,
    scan,
)

MANIFEST = "manifest.json"
FORMAT = 2
READABLE = (1, 2)
TENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a file of a version."""

    file: str
    offset: int
    size: int
    blake3: str


class BadManifest(ValueError):
    """A manifest that does not describe its files."""


def write_manifest(
    folder: Path, version: int, parent: int | None, probe: Probe | None, unchanged: Sequence[str] = ()
) -> None:
    """Write the manifest of what is in a folder. Reads every byte, so call it in a thread.

    `unchanged`: tensors that the version leaves out. Raise OSError.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    manifest = {
        "format": FORMAT,
        "version": version,
        "parent": parent,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {str(file.relative_to(folder)): entry_of(file) for file in files},
        "probe": probe.to_json() if probe else None,
        "unchanged": list(unchanged),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def entry_of(file: Path) -> dict[str, Any]:
    """Return a file's entry in a manifest of format 2. Reads every byte, so call it in a thread. Raise OSError."""
    size = file.stat().st_size
    if file.name.endswith(TENSORS) and not (found := scan(file)).malformed:
        return {"size": size} | _layout(found)
    return {"size": size, "blake3": blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()}


def difference(file: Path, entry: dict[str, Any]) -> tuple[str, Scan | None]:
    """Compare a file with its entry, of format 1 or 2; also return its contents, if it has tensors.

    Returns an empty string if both agree, else what differs. Reads every byte, so call it in a thread. Raise OSError.
    """
    found = scan(file) if file.name.endswith(TENSORS) else None
    if "sha256" in entry:
        with file.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
        return "" if digest == entry["sha256"] else "its sha256 is not the manifest's", found
    if found is None:
        digest = entry_of(file)["blake3"]
        return "" if digest == entry.get("blake3") else "its blake3 is not the manifest's", found
    if found.malformed:
        return found.malformed, found
    mine, stated = _layout(found), entry.get("tensors")
    if not isinstance(stated, dict) or entry.get("piece") != PIECE:
        return f"the manifest needs its tensors, in pieces of {PIECE} bytes", found
    if entry.get("header") != mine["header"]:
        return "its header differs from the manifest", found
    names = sorted(stated.keys() | mine["tensors"].keys())
    wrong = [name for name in names if stated.get(name) != mine["tensors"].get(name)]
    return f"tensor {wrong[0]!r} differs from the manifest" if wrong else "", found


def _layout(found: Scan) -> dict[str, Any]:
    return {
        "piece": PIECE,
        "header": {"size": found.begin, "blake3": found.header},
        "tensors": {
            name: {
                "offset": found.begin + tensor.start,
                "size": tensor.end - tensor.start,
                "blake3": list(found.digests[name]),
            }
            for name, tensor in found.tensors.items()
        },
    }


def published_tensors(folder: Path) -> tuple[dict[str, tuple[str, ...]], frozenset[str]] | None:
    """Return the hashes of each tensor's pieces and the names of tensors that the version may leave out.

    None without a manifest of format 2. Blocks, so call it in a thread.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    if manifest["format"] != FORMAT:
        return None
    files = (entry for name, entry in manifest["files"].items() if name.endswith(TENSORS))
    hashes = {name: tuple(run["blake3"]) for entry in files for name, run in entry["tensors"].items()}
    return hashes, frozenset(manifest.get("unchanged", ()))


class _Run(BaseModel):
    """Bytes that follow one another, and the hashes of their pieces."""

    model_config = ConfigDict(strict=True)

    offset: int = Field(ge=0)
    size: int = Field(ge=0)
    blake3: list[str]


class _Header(BaseModel):
    model_config = ConfigDict(strict=True)

    size: int = Field(ge=0)
    blake3: str


class _File(BaseModel):
    """A file's entry, of either kind."""

    model_config = ConfigDict(strict=True)

    size: int = Field(ge=0)
    blake3: str | None = None
    piece: int = Field(PIECE, ge=1)
    header: _Header | None = None
    tensors: dict[str, _Run] = {}


def pieces_of(files: Mapping[str, Any]) -> list[Piece]:
    """Return the pieces of a version, by the `files` of its manifest (format 2), file by file in the order of their bytes.

    Raise BadManifest for names that lead out of the version's folder, and for pieces that overlap or leave a gap.
    """
    found: list[Piece] = []
    for name, entry in files.items():
        if (
            name in ("", ".", "..", MANIFEST)
            or PurePosixPath(name).name != name
            or "\\" in name
            or "\0" in name
        ):
            raise BadManifest(f"{name!r} is not a file's name")
        try:
            parsed = _File.model_validate(entry)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise BadManifest(f"file {name!r}: {where}: {error.errors()[0]['msg']}") from error
        own = sorted(_pieces(name, parsed), key=lambda piece: (piece.offset, piece.size))
        end = 0
        for piece in own:
            if piece.offset != end:
                raise BadManifest(f"file {name!r}: its pieces do not follow one another at byte {end}")
            end += piece.size
        if end != parsed.size:
            raise BadManifest(f"file {name!r}: its pieces have {end} bytes, and it has {parsed.size}")
        found += own
    return found


def plan_of(files: Mapping[str, Any]) -> dict[str, list[tuple[int, str]]]:
    """Return the size and BLAKE3 of each piece of the files with tensors, in the order of their bytes. Raise BadManifest."""
    plan: dict[str, list[tuple[int, str]]] = {}
    for piece in pieces_of(files):
        if piece.file.endswith(TENSORS) and piece.size:
            plan.setdefault(piece.file, []).append((piece.size, piece.blake3))
    return plan


def _pieces(name: str, entry: _File) -> Iterator[Piece]:
    if entry.blake3 is not None:
        yield Piece(name, 0, entry.size, entry.blake3)
        return
    if entry.header is None:
        raise BadManifest(f"file {name!r} has neither blake3 nor header")
    yield Piece(name, 0, entry.header.size, entry.header.blake3)
    for tensor, run in entry.tensors.items():
        starts = range(0, run.size, entry.piece)
        if len(starts) != len(run.blake3):
            raise BadManifest(f"file {name!r}: tensor {tensor!r} needs {len(starts)} hashes")
        for start, digest in zip(starts, run.blake3, strict=True):
            yield Piece(name, run.offset + start, min(entry.piece, run.size - start), digest)
