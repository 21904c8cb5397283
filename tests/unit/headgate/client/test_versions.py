"""Folders of versions that a foreign trainer writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headgate.client import write_version
from headgate.types import Probe
from headgate.weights.manifest import MANIFEST, difference

PROBE = Probe(((1, 2),), ((-1.0,),), ((-2.0,),))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"w": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / MANIFEST).write_text("{}")
    return folder


def test_arrays_become_a_checkpoint_with_the_files_of_an_earlier_version(tmp_path: Path, base: Path) -> None:
    transposed = np.arange(6, dtype=np.float32).reshape(3, 2).T
    path = write_version(tmp_path / "versions", 7, {"w": transposed}, PROBE, 6, base)
    assert path.name == "v000007"
    np.testing.assert_array_equal(load_file(path / "model.safetensors")["w"], transposed)
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["version"], manifest["parent"], manifest["probe"]) == (7, 6, PROBE.to_json())
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert {difference(path / name, entry)[0] for name, entry in manifest["files"].items()} == {""}


def test_a_folder_gives_its_tensors_and_not_its_configuration(tmp_path: Path, base: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    save_file({"w": np.ones((2, 3), np.float32)}, saved / "model.safetensors")
    (saved / "config.json").write_text('{"dtype": "float32"}')
    path = write_version(tmp_path / "versions", 1, saved, PROBE, 0, base)
    assert load_file(path / "model.safetensors")["w"].sum() == 6
    assert (path / "config.json").read_text() == '{"dtype": "bfloat16"}'


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, base: Path) -> None:
    arrays = {"w": np.zeros((2, 3), np.float32)}
    names = [write_version(tmp_path / "versions", 1, arrays, PROBE, 0, base).name for _ in range(2)]
    assert names == ["v000001", "v000001-2"]


def test_a_tensor_of_another_library_is_named_and_nothing_is_written(tmp_path: Path, base: Path) -> None:
    with pytest.raises(TypeError, match="tensor 'w' is a list: give NumPy arrays"):
        write_version(tmp_path / "versions", 1, {"w": [0.0]}, PROBE, 0, base)  # type: ignore[dict-item]
    assert list((tmp_path / "versions").iterdir()) == []
