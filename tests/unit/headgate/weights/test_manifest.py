"""Hashes of a version's files and tensors, held against BLAKE3 of bytes that numpy made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save_file

from gateway.updates.weights_check import known_weights, read_weights
from headgate.errors import Unprocessable
from headgate.weights.manifest import BadManifest, entry_of, pieces_of

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
    header, data = 8 + int.from_bytes(whole[:8], "little"), long.tobytes()
    assert len(data) == 2 * PIECE + 10
    assert entry["size"] == len(whole)
    assert entry["header"] == {"size": header, "blake3": blake3(whole[:header]).hexdigest()}
    hashes = {
        "long": [data[:PIECE], data[PIECE : 2 * PIECE], data[2 * PIECE :]],
        "short": [arrays["short"].tobytes()],
        "none": [],
    }
    for name, run in entry["tensors"].items():
        assert whole[run["offset"] : run["offset"] + run["size"]] == arrays[name].tobytes()
        assert run["blake3"] == [blake3(piece).hexdigest() for piece in hashes[name]]
    pieces = pieces_of({"model.safetensors": entry})
    assert [blake3(whole[p.offset : p.offset + p.size]).hexdigest() for p in pieces] == [
        p.blake3 for p in pieces
    ]
    assert sum(piece.size for piece in pieces) == len(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e["tensors"]["b"].update(offset=0), "do not follow one another"),
        (lambda e: e["tensors"]["b"].update(size=1, blake3=["0"]), "do not follow one another|bytes"),
        (lambda e: e["tensors"]["b"].update(blake3=[]), "tensor 'b' needs 1 hashes"),
        (lambda e: e["tensors"].pop("b"), "do not follow one another|bytes"),
        (lambda e: e.update(size=-1), "size"),
        (lambda e: e.update(size=10**6), "and it has 1000000"),
        (lambda e: e["tensors"]["b"].update(size="4"), "tensors.b.size"),
        (lambda e: e.pop("header"), "neither blake3 nor header"),
    ],
)
def test_a_manifest_whose_pieces_are_not_the_file_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    folder = write(tmp_path / "v1", {"a": np.ones(3, np.float32), "b": np.ones(5, np.float32)})
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert pieces_of(files)
    change(files["model.safetensors"])
    with pytest.raises(BadManifest, match=words):
        pieces_of(files)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "manifest.json", "a\0b"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(BadManifest, match="not a file's name"):
        pieces_of({name: {"size": 0, "blake3": blake3(b"").hexdigest()}})


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
    with pytest.raises(Unprocessable, match="tensor 'b' differs from the manifest"):
        read_weights(folder, 1)


def test_a_known_version_is_not_read_again_but_for_its_sizes(tmp_path: Path) -> None:
    folder = write(tmp_path / "v1", {"a": np.ones(3, np.float32)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert known_weights(folder, 1).path == str(folder)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Unprocessable, match=r"model\.safetensors: \d+ bytes"):
        known_weights(folder, 1)
