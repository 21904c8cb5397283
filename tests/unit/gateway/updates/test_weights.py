"""Weights are checked byte by byte before an engine sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.updates.weights_check import read_weights
from headgate.errors import Unprocessable
from tests.harness.weights import fake_weights, publish

PROBE = {"sequences": [[1, 2]], "new_logprobs": [[-1.0]], "parent_logprobs": [[-2.0]]}


@pytest.fixture
def version_one(tmp_path: Path) -> Path:
    source = fake_weights(tmp_path / "source", "weights of version one")
    (source / "config.json").write_text("{}")
    return publish(source, tmp_path / "v1", 1, 0, PROBE)


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest."""
    file = directory / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def refusal(directory: Path, version: int = 1) -> Unprocessable:
    with pytest.raises(Unprocessable) as error:
        read_weights(directory, version)
    assert str(directory) in error.value.message, "the message names the folder"
    return error.value


def test_sound_weights_are_read(version_one: Path) -> None:
    weights = read_weights(version_one, 1)
    assert (weights.version, weights.parent, weights.path) == (1, 0, str(version_one))
    assert weights.probe is not None
    assert weights.probe.to_json() == PROBE | {"noise": 0.0}


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(7)


def alter(folder: Path) -> None:
    """Change the content of a file, and not its size."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"one", b"two"))


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (truncate, "truncated_weights", "model.safetensors: 7 bytes, the manifest has "),
        (alter, "wrong_sha256", "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("[]"), "wrong_sha256", "config.json"),
        (lambda folder: (folder / "config.json").unlink(), "truncated_weights", "config.json"),
    ],
    ids=["truncated", "altered", "small", "missing"],
)
def test_a_file_that_is_not_the_manifests_is_refused(
    version_one: Path, spoil: Callable[[Path], object], code: str, words: str
) -> None:
    spoil(version_one)
    error = refusal(version_one)
    assert error.code == code and words in error.message


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").code == "no_manifest"
    assert refusal(fake_weights(tmp_path / "bare", "x")).code == "no_manifest"


def test_the_manifest_of_another_version_is_refused(version_one: Path) -> None:
    assert "of version 1, not 2" in refusal(version_one, 2).message


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format": 2, "version": 1, "files": {}}', '"\\ud800'])
def test_a_manifest_that_is_none_is_refused(version_one: Path, text: str) -> None:
    (version_one / "manifest.json").write_text(text)
    assert refusal(version_one).code == "bad_manifest"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version="1"),
        lambda m: m.update(files=[]),
        lambda m: m.update(files={}),
        lambda m: m["files"].pop("model.safetensors"),
        lambda m: m["files"].update({"config.json": "0"}),
        lambda m: m["files"].update({"config.json": None}),
        lambda m: m.update(parent="zero"),
    ],
)
def test_a_manifest_of_the_wrong_form_is_refused(
    version_one: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    edit(version_one, change)
    assert refusal(version_one).code == "bad_manifest"


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/hostname", "sub/../../outside.txt", "link.txt"])
def test_a_file_outside_the_directory_is_refused(version_one: Path, name: str) -> None:
    outside = version_one.parent / "outside.txt"
    outside.write_text("secret")
    (version_one / "sub").mkdir()
    (version_one / "link.txt").symlink_to(outside)
    edit(version_one, lambda m: m["files"].update({name: {"size": 6, "sha256": "0"}}))
    error = refusal(version_one)
    assert error.code == "bad_manifest"
    assert "outside" in error.message


@pytest.mark.parametrize(
    "probe",
    [
        7,
        [1],
        {"sequences": []},
        {**PROBE, "new_logprobs": [[]]},
        {**PROBE, "sequences": [["x", 1]]},
        {"sequences": [], "new_logprobs": [], "parent_logprobs": []},
        {"sequences": [[1]], "new_logprobs": [[]], "parent_logprobs": [[]]},
        {**PROBE, "new_logprobs": []},
        {**PROBE, "parent_logprobs": []},
    ],
)
def test_a_bad_probe_is_refused(version_one: Path, probe: Any) -> None:
    edit(version_one, lambda m: m.update(probe=probe))
    assert refusal(version_one).code == "bad_probe"
