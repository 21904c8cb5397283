"""The manifest of a version of weights: each file by its size and BLAKE3; of tensors, the header and each piece by its own.

The trainer writes format 2; manifests of format 1, with a SHA-256 for each file, are read too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from blake3 import blake3

from gateway.weights.tensors import PIECE, Scan, scan

MANIFEST = "manifest.json"
FORMAT = 2
READABLE = (1, 2)
TENSORS = ".safetensors"


def entry_of(file: Path) -> dict[str, Any]:
    """A file's entry in a manifest of format 2. Reads every byte, so call it in a thread. Raises OSError."""
    size = file.stat().st_size
    if not file.name.endswith(TENSORS):
        return {"size": size, "blake3": blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()}
    found = scan(file)
    return {"size": size, "piece": PIECE, "header": found.header, "tensors": _entries(found)}


def difference(file: Path, entry: dict[str, Any]) -> tuple[str, Scan | None]:
    """Compares a file with its entry, of format 1 or 2; also answers what is in it, if it has tensors.

    Returns an empty string if both agree, else what differs. Reads every byte, so call it in a thread. Raises OSError.
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
    stated, mine = entry.get("tensors"), _entries(found)
    if not isinstance(stated, dict) or entry.get("piece") != PIECE:
        return f"the manifest needs its tensors, in pieces of {PIECE} bytes", found
    if entry.get("header") != found.header:
        return "its header is not as the manifest says", found
    wrong = [name for name in sorted(stated.keys() | mine.keys()) if stated.get(name) != mine.get(name)]
    return f"tensor {wrong[0]!r} is not as the manifest says" if wrong else "", found


def _entries(found: Scan) -> dict[str, list[str]]:
    return {name: list(digests) for name, digests in found.digests.items()}
