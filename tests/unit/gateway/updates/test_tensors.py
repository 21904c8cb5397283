"""A version's tensors are compared with the first version's before any engine sees them. Files are written by safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from gateway.updates.weights_check import read_weights
from headgate.errors import Unprocessable
from headgate.weights.tensors import scan
from tests.harness.models import save_model, tensors
from tests.harness.weights import fake_weights, write_manifest

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(dtype: Any = np.float32) -> Arrays:
    return {
        "model.embed_tokens.weight": np.ones((6, 4), dtype),
        "model.layers.0.weight": np.ones((4, 4), dtype),
        "lm_head.weight": np.ones((6, 4), dtype),
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the first version's checkpoint, in one file."""
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(arrays(), folder / "model.safetensors")
    return folder


def version(tmp_path: Path, *shards: Arrays, index: bool = False, **values: Any) -> Path:
    """Version 1, a file for each shard."""
    folder = tmp_path / "v1"
    folder.mkdir()
    names = (
        ["model.safetensors"] if len(shards) == 1 else [f"model-{i}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    if index:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    write_manifest(folder, 1, 0)
    edit(folder, **values)
    return folder


def edit(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, **values}))


def refusal(folder: Path, base: Path) -> Unprocessable:
    with pytest.raises(Unprocessable) as error:
        read_weights(folder, 1, base)
    assert error.value.status == 422
    return error.value


def test_the_same_tensors_with_other_numbers_are_a_version(tmp_path: Path, base: Path) -> None:
    other = {name: array * 2 for name, array in arrays().items()}
    assert read_weights(version(tmp_path, other), 1, base).version == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda a: a.update(extra=np.ones(2, np.float32)),
            "tensor 'extra' is not one of the first version's",
        ),
        (
            lambda a: a.update({"model.layers.0.weight": np.ones((4, 5), np.float32)}),
            "tensor 'model.layers.0.weight' has the shape [4, 5], the first version's has [4, 4]",
        ),
        (
            lambda a: a.update({"model.layers.0.weight": np.ones((4, 4), np.int32)}),
            "tensor 'model.layers.0.weight' is of I32, the first version's of F32",
        ),
        (lambda a: a.pop("model.layers.0.weight"), "tensor 'model.layers.0.weight' is missing"),
        (lambda a: a.pop("lm_head.weight"), "tensor 'lm_head.weight' is missing"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path, base: Path, change: Callable[[Arrays], object], words: str
) -> None:
    changed = arrays()
    change(changed)
    error = refusal(version(tmp_path, changed), base)
    assert error.code == "wrong_tensors"
    assert words in error.message


def test_several_misfits_are_counted(tmp_path: Path, base: Path) -> None:
    message = refusal(version(tmp_path, {"x": np.ones(1, np.float32)}), base).message
    assert "tensor 'x'" in message
    assert "3 other tensors do not fit" in message


@pytest.mark.parametrize("place", [0, 23])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(tmp_path: Path, base: Path, place: int) -> None:
    """Also in a row of the embedding that no token uses, which no probe would show."""
    spoiled = arrays()
    spoiled["model.embed_tokens.weight"].flat[place] = np.nan
    error = refusal(version(tmp_path, spoiled), base)
    assert error.code == "not_finite"
    assert "tensor 'model.embed_tokens.weight' has numbers that are not finite" in error.message


@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_exactly_what_torch_calls_finite_is_finite(tmp_path: Path, name: str) -> None:
    """Every 8-bit and 16-bit number, and the extreme ones of the others."""
    dtype = getattr(torch, name)
    if dtype.itemsize <= 2:
        kind = torch.uint8 if dtype.itemsize == 1 else torch.uint16
        numbers = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64).to(kind).view(dtype)
    else:
        info = torch.finfo(dtype)
        extremes = [info.max, info.min, info.tiny, 0.0, -0.0, float("nan"), float("inf"), -float("inf")]
        numbers = torch.tensor(extremes, dtype=dtype)
    truth = torch.isfinite(numbers.to(torch.float64))
    file = tmp_path / "x.safetensors"
    save_torch({"all": numbers[truth].clone()}, file)
    assert scan(file).not_finite == ()
    for number in numbers[~truth][:300]:
        save_torch({"one": number.reshape(1).clone()}, file)
        assert scan(file).not_finite == ("one",), number


def test_large_tensors_are_looked_at_to_the_end(tmp_path: Path) -> None:
    numbers = np.zeros(
        2**22 + 2**18 + 5, np.float32
    )  # a piece of 16 MiB, one of 1 MiB within the second, and a rest
    file = tmp_path / "x.safetensors"
    for place in (0, 2**18 - 1, 2**18, 2**22 - 1, 2**22, len(numbers) - 1):
        numbers[:] = 0
        numbers[place] = np.nan
        save_file({"a": np.ones(3, np.int8), "b": numbers, "c": np.ones(1, np.float32)}, file)
        assert scan(file).not_finite == ("b",)


def test_a_version_may_list_unchanged_tensors(tmp_path: Path, base: Path) -> None:
    less = arrays()
    del less["model.layers.0.weight"]
    folder = version(tmp_path, less, unchanged=["model.layers.0.weight"])
    assert read_weights(folder, 1, base).version == 1
    edit(folder, parent=None)
    assert refusal(folder, base).code == "bad_manifest"
    edit(folder, parent=0, unchanged=[7])
    assert refusal(folder, base).code == "bad_manifest"


def test_however_the_checkpoints_are_cut_up(tmp_path: Path) -> None:
    """Several files with an index against one file, against several, and without an index."""
    cut = list(arrays().items())
    shards = [dict(cut[:1]), dict(cut[1:])]
    folders = [version(tmp_path / "a", arrays()), version(tmp_path / "b", *shards, index=True)]
    folders.append(version(tmp_path / "c", *shards))
    for base in folders:
        for folder in folders:
            assert read_weights(folder, 1, base).version == 1


@pytest.fixture(autouse=True)
def places(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()


def test_a_tensor_in_two_files_or_outside_the_indexs_file_is_refused(tmp_path: Path, base: Path) -> None:
    cut = list(arrays().items())
    twice = version(tmp_path / "a", dict(cut[:2]), dict(cut[1:]))
    assert "tensor 'model.layers.0.weight' is in two files" in refusal(twice, base).message
    lies = version(tmp_path / "b", dict(cut[:1]), dict(cut[1:]), index=True)
    index = lies / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-0", "model-1"))
    write_manifest(lies, 1, 0)
    assert "weight_map" in refusal(lies, base).message


def test_a_file_that_only_engines_would_see_is_refused(tmp_path: Path, base: Path) -> None:
    folder = version(tmp_path, arrays())
    save_file({"model.layers.0.weight": np.zeros((4, 4), np.float32)}, folder / "more.safetensors")
    error = refusal(folder, base)
    assert (error.code, "more.safetensors" in error.message) == ("bad_manifest", True)


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path, base: Path) -> None:
    less = arrays()
    del less["lm_head.weight"]
    folder = version(tmp_path, less)
    assert "lm_head" in refusal(folder, base).message
    (base / "config.json").write_text('{"tie_word_embeddings": true}')
    assert read_weights(folder, 1, base).version == 1
    save_file(less, base / "model.safetensors")
    assert read_weights(version(tmp_path / "a", arrays()), 1, base).version == 1
    (base / "config.json").write_text('{"text_config": {"tie_word_embeddings": true}}')
    assert read_weights(folder, 1, base).version == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"weights",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b'{"a"',
        (8).to_bytes(8, "little") + b'{"a": 7}',
        (20000).to_bytes(8, "little") + b"[" * 20000,
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, base: Path, content: bytes) -> None:
    folder = version(tmp_path, arrays())
    (folder / "model.safetensors").write_bytes(content)
    write_manifest(folder, 1, 0)
    assert refusal(folder, base).code == "wrong_tensors"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 20]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]},
        {"dtype": "F4", "shape": [4], "data_offsets": [0, -16]},
        {"dtype": 4, "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, base: Path, entry: dict[str, Any]) -> None:
    folder = version(tmp_path, arrays())
    head = json.dumps({"x": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    write_manifest(folder, 1, 0)
    assert refusal(folder, base).code == "wrong_tensors"


def test_what_transformers_saves_of_the_tiny_model_has_the_tensors_that_tests_write(tmp_path: Path) -> None:
    save_model(tmp_path / "base", seed=1)
    folder = fake_weights(tmp_path / "v1", "some")
    write_manifest(folder, 1, 0)
    assert read_weights(folder, 1, tmp_path / "base").version == 1
    assert len(tensors()) == 25
