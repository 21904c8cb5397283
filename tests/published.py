"""Weights directories for tests, written here and not by the trainer, so that the gateway's reader has an independent writer."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

from tests.tiny import tensors


def publish(
    source: Path, target: Path, version: int, parent: int | None, probe: dict[str, Any] | None = None
) -> Path:
    """Copies a checkpoint and adds a manifest."""
    shutil.copytree(source, target)
    write_manifest(target, version, parent, probe)
    return target


def write_manifest(directory: Path, version: int, parent: int | None, probe: dict[str, Any] | None) -> None:
    """Writes `manifest.json` for what is in a directory."""
    files = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(directory.iterdir())
        if file.name != "manifest.json"
    }
    manifest = {"format": 1, "version": version, "parent": parent, "files": files, "probe": probe}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def fake_weights(directory: Path, content: str) -> Path:
    """A checkpoint for the fake engine: zeros under the names of the tiny model; its identity is the content of one file."""
    directory.mkdir(parents=True)
    header: dict[str, Any] = {"__metadata__": {"content": content}}
    end = 0
    for name, shape in tensors().items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    return directory
