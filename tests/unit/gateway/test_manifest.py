"""Hashes of a version's files and tensors, held against BLAKE3 of bytes that numpy made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from gateway.errors import Unprocessable
from gateway.rollout.weights import known_weights, read_weights
from gateway.weights.manifest import entry_of

PIECE = 16 * 2**20


def write(folder: Path, arrays: dict[str, Any]) -> Path:
    """Version 1 with a manifest of format 2."""
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", {"made": "here"})
    (folder / "config.json").write_text('{"hidden_size": 4}')
    files = {file.name: entry_of(file) for file in sorted(folder.iterdir())}
    manifest = {"format": 2, "version": 1, "parent": 0, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_every_piece_of_a_tensor_has_its_own_hash(tmp_path: Path) -> None:
    long = np.random.default_rng(0).integers(0, 2**16, PIECE + 5, np.uint16)
    arrays = {"long": long, "short": np.arange(3, dtype=np.float32), "none": np.zeros(0, np.float32)}
    folder = write(tmp_path / "v1", arrays)
    whole = (folder / "model.safetensors").read_bytes()
    entry = json.loads((folder / "manifest.json").read_text())["files"]["model.safetensors"]
    data = long.tobytes()
    assert entry["tensors"] == {
        "long": [blake3(piece).hexdigest() for piece in (data[:PIECE], data[PIECE : 2 * PIECE], data[2 * PIECE :])],
        "short": [blake3(arrays["short"].tobytes()).hexdigest()],
        "none": [],
    }  # fmt: skip
    assert len(data) == 2 * PIECE + 10
    header = 8 + int.from_bytes(whole[:8], "little")
    assert (entry["size"], entry["header"]) == (len(whole), blake3(whole[:header]).hexdigest())


def test_any_byte_that_changed_on_the_way_is_found(tmp_path: Path) -> None:
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)}
    folder = write(tmp_path / "v1", arrays)
    assert read_weights(folder, 1, folder).version == 1
    for name in ("model.safetensors", "config.json"):
        whole = bytearray((folder / name).read_bytes())
        for place in range(len(whole)):
            whole[place] ^= 1
            (folder / name).write_bytes(whole)
            with pytest.raises(Unprocessable, match=name) as error:
                read_weights(folder, 1)
            assert error.value.code == "wrong_hash"
            whole[place] ^= 1
        (folder / name).write_bytes(whole)
    assert read_weights(folder, 1, folder).version == 1


def test_the_tensor_that_changed_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "v1", {"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(Unprocessable, match="tensor 'b' is not as the manifest says"):
        read_weights(folder, 1)


def test_a_known_version_is_not_read_again_but_for_its_sizes(tmp_path: Path) -> None:
    folder = write(tmp_path / "v1", {"a": np.ones(3, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert known_weights(folder, 1).path == str(folder)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Unprocessable, match=r"model\.safetensors: \d+ bytes"):
        known_weights(folder, 1)
