"""Versions that engines open in the trainer's memory: here the host's, between real processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headgate.weights.manifest import plan_of, write_manifest
from headgate.weights.plugin.headgate_transfer import devices, handles, wire
from headgate.weights.plugin.headgate_transfer.groups import TransferError
from headgate.weights.plugin.headgate_transfer.wire import Join, Receiver, Sender
from trainer.publish.shown import ShownVersion, listing_for

NAME = "model.safetensors"
LIMIT_S = 120.0
FRAME = 64
HEAD = torch.arange(40, dtype=torch.bfloat16).reshape(5, 8)
TENSORS = {
    "layers.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layers.1.weight": torch.arange(10, dtype=torch.bfloat16),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
    "embedding": HEAD,
}
MEMORY = TENSORS | {"tied head": HEAD}
"""A model's state also has the second name of a tied weight, which its file has not."""
HERE = [{"gpu": "", "memory": devices.shared_memory()}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a version's folder, of more bytes than one frame has."""
    monkeypatch.setattr(wire, "FRAME", FRAME)
    path = tmp_path / "v000007"
    path.mkdir()
    save_file(TENSORS, path / NAME)
    write_manifest(path, 7, 6, None)
    return path


@pytest.fixture
def shown(folder: Path) -> Iterator[ShownVersion]:
    found = ShownVersion(folder.parent, "cpu")
    yield found
    found.close()


def plan_in(folder: Path) -> Any:
    return plan_of(json.loads((folder / "manifest.json").read_bytes())["files"])


def opened_by(folder: Path) -> tuple[Sender, Join]:
    listing = listing_for(folder, "auto", HERE)
    assert listing is not None
    plan = plan_in(folder)
    sender = Sender(folder, plan, "auto", "127.0.0.1", 1, 30.0, devices=HERE, shown=listing)
    return sender, Join(7, sender.backend, "127.0.0.1", sender.port, 2, plan, 30.0, shown=True)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def _receive(join: Join, found: Any) -> None:
    wire.FRAME = FRAME
    found.put("its imports are done")
    received = Receiver(join, 1).result(LIMIT_S)
    found.put({name: _digest(tensor) for name, tensor in received.tensors()})


def test_another_process_opens_exactly_the_tensors_of_the_file(folder: Path, shown: ShownVersion) -> None:
    """The file's own reader is the reference; nothing is read from the file for the transfer."""
    shown.fill(MEMORY)
    shown.show(folder)
    with safe_open(folder / NAME, "pt") as file:
        expected = {name: _digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    sender, join = opened_by(folder)
    (folder / NAME).write_bytes(bytes((folder / NAME).stat().st_size))
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    process = context.Process(target=_receive, args=(join, found), daemon=True)
    process.start()
    found.get(timeout=LIMIT_S)
    sender.send()
    assert found.get(timeout=LIMIT_S) == expected
    process.join(LIMIT_S)


def test_a_flipped_byte_is_refused_on_both_sides(folder: Path, shown: ShownVersion) -> None:
    wrong = dict(MEMORY, odd=torch.tensor([1, 2, 4], dtype=torch.int8))
    shown.fill(wrong)
    shown.show(folder)
    sender, join = opened_by(folder)
    receiver = Receiver(join, 1)
    with pytest.raises(TransferError, match=r"refused what it received: model.safetensors: the 3 bytes at"):
        sender.send()
    with pytest.raises(TransferError, match="are not the manifest's"):
        receiver.result(30.0)


def test_the_next_version_takes_the_place_of_the_one_before_which_is_listed_no_more(
    folder: Path, shown: ShownVersion
) -> None:
    shown.fill(MEMORY)
    assert listing_for(folder, "auto", HERE) is None, "its folder may not be whole yet"
    shown.show(folder)
    before = listing_for(folder, "ipc", HERE)
    assert before is not None
    shown.fill(MEMORY)
    assert listing_for(folder, "auto", HERE) is None
    shown.show(folder)
    assert listing_for(folder, "auto", HERE) == before, "the same memory"


@pytest.mark.parametrize(
    ("backend", "workers"),
    [
        ("gloo", HERE),
        ("auto", []),
        ("auto", [{"gpu": "", "memory": "another machine's"}]),
        ("auto", [*HERE, {"gpu": "", "memory": ""}]),
    ],
)
def test_only_workers_that_can_all_open_the_memory_are_given_it(
    folder: Path, shown: ShownVersion, backend: str, workers: list[dict[str, str]]
) -> None:
    shown.fill(MEMORY)
    shown.show(folder)
    assert listing_for(folder, backend, workers) is None


def test_an_accelerators_memory_is_opened_on_the_same_accelerator_alone() -> None:
    handle = {"gpu": "GPU-0"}
    assert handles.opens(handle, {"gpu": "GPU-0", "memory": "any"})
    assert not handles.opens(handle, {"gpu": "GPU-1", "memory": devices.shared_memory()})
    assert not handles.opens({"gpu": ""}, {"gpu": "", "memory": ""})


def test_a_version_of_other_tensors_than_those_in_memory_is_not_listed(
    folder: Path, shown: ShownVersion
) -> None:
    shown.fill({name: tensor for name, tensor in MEMORY.items() if name != "odd"})
    with pytest.raises(ValueError, match=f"{NAME} has odd, which the model in memory does not have"):
        shown.show(folder)
    assert listing_for(folder, "auto", HERE) is None


def _show_for_ever(folder: Path, ready: Any) -> None:
    version = ShownVersion(folder.parent, "cpu")
    version.fill(MEMORY)
    version.show(folder)
    ready.put(True)
    signal.pause()


def test_what_a_killed_trainer_showed_is_used_by_nobody_and_removed_at_the_next_start(
    folder: Path, shown: ShownVersion
) -> None:
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue()
    process = context.Process(target=_show_for_ever, args=(folder, ready), daemon=True)
    process.start()
    ready.get(timeout=LIMIT_S)
    assert process.pid is not None
    assert listing_for(folder, "auto", HERE) is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT_S)
    left = [*handles.SHARED.glob(f"{handles.NAME}{process.pid}-*")]
    assert left, "it had no time to remove it"
    assert listing_for(folder, "auto", HERE) is None
    shown.withdraw()  # as a new start does
    shown.fill(MEMORY)
    assert not any(path.exists() for path in (*left, folder.with_name("v000007.shown")))


def test_no_file_elsewhere_is_opened_as_memory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(ValueError, match="is not the memory of a transfer"):
        handles.opened({"memory": "", "path": str(tmp_path / "secret"), "size": 1})
