"""Weights directories for tests, written here and not by the trainer, so that the gateway's reader has an independent writer."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from gateway.engines.fake import identity, token_logprob
from tests.harness.models import tensors


def publish(
    source: Path, target: Path, version: int, parent: int | None, probe: dict[str, Any] | None = None
) -> Path:
    """Copy a checkpoint and adds a manifest."""
    shutil.copytree(source, target)
    write_manifest(target, version, parent, probe)
    return target


def publish_pieces(
    source: Path, target: Path, version: int, parent: int | None, probe: dict[str, Any] | None = None
) -> Path:
    """Return the same with a manifest of format 2."""
    shutil.copytree(source, target)
    write_manifest_of_pieces(target, version, parent, probe)
    return target


def write_manifest(
    directory: Path, version: int, parent: int | None, probe: dict[str, Any] | None = None
) -> None:
    """Write `manifest.json` for what is in a directory; without a `probe`, with one that does not distinguish its parent."""
    files = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(directory.iterdir())
        if file.name != "manifest.json"
    }
    probe = probe or probe_of(directory, directory)
    manifest = {"format": 1, "version": version, "parent": parent, "files": files, "probe": probe}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def write_manifest_of_pieces(
    directory: Path, version: int, parent: int | None, probe: dict[str, Any] | None = None
) -> None:
    """Write the same in format 2, for tensors of at most one piece (16 MiB) each."""
    files = {file.name: _pieces(file) for file in sorted(directory.iterdir()) if file.name != "manifest.json"}
    probe = probe or probe_of(directory, directory)
    manifest = {"format": 2, "version": version, "parent": parent, "files": files, "probe": probe}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _pieces(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return {"size": len(data), "blake3": blake3(data).hexdigest()}
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            start, end = (begin + place for place in entry["data_offsets"])
            hashes = [blake3(data[start:end]).hexdigest()]
            tensors[name] = {"offset": start, "size": end - start, "blake3": hashes}
    header = {"size": begin, "blake3": blake3(data[:begin]).hexdigest()}
    return {"size": len(data), "piece": 2**24, "header": header, "tensors": tensors}


def fake_weights(directory: Path, content: str) -> Path:
    """Write a checkpoint for the fake engine: zeros under the names of the tiny model; `content` is its identity."""
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


def identity_of(weights: Path | str) -> str:
    """Return the fake engine's identity of weights, for which it reads the whole file: here once for each state of the file."""
    changed = [file.stat().st_mtime_ns for file in Path(weights).glob("*.safetensors")]
    return _identity(str(weights), max(changed, default=0))


@cache
def _identity(weights: str, _changed_ns: int) -> str:
    return identity(weights)


RANK = 4


def fake_adapter(directory: Path, content: str, target: str = "q_proj") -> Path:
    """Return an adapter for the fake engine: zeros for one matrix of each layer of the tiny model; `content` is its identity."""
    directory.mkdir(parents=True)
    header: dict[str, Any] = {"__metadata__": {"content": content}}
    end = 0
    for name, shape in tensors().items():
        module = name.removesuffix(".weight")
        if module.endswith(target):
            for factor, sizes in (("lora_A", [RANK, shape[1]]), ("lora_B", [shape[0], RANK])):
                start, end = end, end + 4 * math.prod(sizes)
                entry = {"dtype": "F32", "shape": sizes, "data_offsets": [start, end]}
                header[f"base_model.model.{module}.{factor}.weight"] = entry
    head = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [target]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


SEQUENCE = [5, 9, 200, 3, 77, 12]
"""The tokens that probes score."""


def probe_of(new: Path, parent: Path) -> dict[str, Any]:
    """Return a probe with the fake engine's log-probabilities under both weights."""

    def scores(weights: Path) -> list[float]:
        known, pairs = identity_of(weights), pairwise(SEQUENCE)
        return [token_logprob(known, previous, token) for previous, token in pairs]

    return {"sequences": [SEQUENCE], "new_logprobs": [scores(new)], "parent_logprobs": [scores(parent)]}


def unlike(directory: Path, model: Path) -> dict[int, Path]:
    """Version 0 is the model; 1 to 4 have nothing in common with it or each other."""
    found = {0: model}
    for version in range(1, 5):
        source = fake_weights(directory / f"source-{version}", f"weights {version}")
        probe = probe_of(source, found[version - 1])
        found[version] = publish(source, directory / f"v{version}", version, version - 1, probe)
    return found
