"""Bad adapters are refused before any engine loads them, with the file or the tensor and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.updates.weights_check import read_weights
from headgate.errors import Unprocessable
from tests.harness.weights import fake_adapter, fake_weights, write_manifest_of_pieces

RANK = 16


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return fake_weights(tmp_path / "base", "base")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = fake_adapter(tmp_path / "v000001", "adapter 1")
    write_manifest_of_pieces(path, 1, 0)
    return path


def _flip(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def _header(adapter: Path, change: Callable[[dict[str, Any]], object], tail: bytes = b"") -> None:
    """Change the names and shapes of the tensors; the manifest agrees with what comes of it."""
    file = adapter / "adapter_model.safetensors"
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    change(header)
    head = json.dumps(header).encode()
    body = data[begin : len(data) - len(tail)] + tail
    file.write_bytes(len(head).to_bytes(8, "little") + head + body)
    write_manifest_of_pieces(adapter, 1, 0)


FACTOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
NAN = b"\x00\x00\xc0\x7f"


def _reshaped(header: dict[str, Any]) -> None:
    header[FACTOR]["shape"] = header[FACTOR]["shape"][::-1]


def _renamed(header: dict[str, Any]) -> None:
    header[FACTOR.replace("q_proj", "v_proj")] = header.pop(FACTOR)


def _config(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    write_manifest_of_pieces(adapter, 1, 0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_flip, "differs from the manifest"),
        (lambda adapter: _header(adapter, lambda _: None, NAN), "not finite"),
        (lambda adapter: _config(adapter, target_modules=["q_proj", "o_proj"]), "o_proj.* is missing"),
        (lambda adapter: _header(adapter, _renamed), "is not a factor"),
        (lambda adapter: _header(adapter, _reshaped), "has the shape"),
        (lambda adapter: _config(adapter, r=64), "rank is 64"),
        (lambda adapter: _config(adapter, target_modules=["q_proj", "lm_head"]), "no adapters of 'lm_head'"),
        (lambda adapter: _config(adapter, use_dora=True), "use_dora"),
    ],
    ids=["flipped", "nan", "missing", "extra", "misshapen", "rank", "head", "dora"],
)
def test_an_adapter_that_is_no_good_is_refused(
    base: Path, adapter: Path, spoil: Callable[[Path], None], words: str
) -> None:
    assert read_weights(adapter, 1, base, RANK).adapter.startswith("v1-")
    spoil(adapter)
    with pytest.raises(Unprocessable, match=words):
        read_weights(adapter, 1, base, RANK)


def test_whole_weights_and_adapters_are_not_taken_for_one_another(base: Path, adapter: Path) -> None:
    write_manifest_of_pieces(base, 1, 0)
    with pytest.raises(Unprocessable, match=r"\[weights\] transport = 'lora' in the trainer"):
        read_weights(base, 1, base, RANK)
    with pytest.raises(Unprocessable, match=r"set \[engine\] transport = 'lora'"):
        read_weights(adapter, 1, base)


def test_a_name_stands_for_the_bytes_of_an_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = fake_adapter(tmp_path / "other", "adapter 1 of another run")
    write_manifest_of_pieces(other, 1, 0)
    names = {read_weights(path, 1, base, RANK).adapter for path in (adapter, other)}
    assert len(names) == 2, "an engine that has the one does not take it for the other"
