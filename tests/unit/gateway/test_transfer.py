"""Bytes from a sender to receivers over real gloo, and what the receivers accept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gateway.weights.manifest import entry_of, plan_of
from gateway.weights.plugin.headgate_transfer import wire
from gateway.weights.plugin.headgate_transfer.wire import Join, Receiver, Sender, TransferError, frames_of

NAME = "model.safetensors"
TENSORS = {
    "layers.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layers.1.weight": torch.arange(10, dtype=torch.bfloat16),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version whose pieces are too many for one frame."""
    monkeypatch.setattr(wire, "FRAME", 64)
    save_file(TENSORS, tmp_path / NAME)
    return tmp_path


def plan_in(folder: Path) -> Any:
    return plan_of({NAME: entry_of(folder / NAME)})


def join(sender: Sender, plan: Any, workers: int = 1, timeout_s: float = 30.0) -> Join:
    return Join(7, "gloo", "127.0.0.1", sender.port, workers + 1, plan, timeout_s)


def test_every_worker_of_an_engine_has_every_tensor(folder: Path) -> None:
    plan = plan_in(folder)
    frames = list(frames_of(plan))
    assert len(frames) > 2
    assert [frame.start for frame in frames] == [sum(f.size for f in frames[:i]) for i in range(len(frames))]
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 2, 30.0)
    receivers = [Receiver(join(sender, plan, 2), rank) for rank in (1, 2)]
    sender.send()
    for receiver in receivers:
        found = dict(receiver.result(30.0).tensors())
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].tolist()) == (tensor.dtype, tensor.tolist())


def test_bytes_that_are_not_the_manifests_are_refused_and_both_sides_say_which(folder: Path) -> None:
    plan = plan_in(folder)
    file = folder / NAME
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 30.0)
    receiver = Receiver(join(sender, plan), 1)
    with pytest.raises(TransferError, match=r"refused what it received: model.safetensors: the \d+ bytes at"):
        sender.send()
    with pytest.raises(TransferError, match="are not the manifest's"):
        receiver.result(30.0)


def test_a_sender_of_another_version_is_not_joined(folder: Path) -> None:
    plan = plan_in(folder)
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 0.5)
    other = {NAME: [(size, "0" * 64) for size, _ in plan[NAME]]}
    receiver = Receiver(join(sender, other), 1)
    with pytest.raises(TransferError, match="the sender has another version 7"):
        receiver.result(30.0)
    with pytest.raises(TransferError, match="could not join the group"):
        sender.send()


def test_nobody_waits_longer_than_its_deadline_for_a_peer_that_is_silent(folder: Path) -> None:
    """The receiver stops before its second frame, as if its machine stood still; the sender then leaves it."""
    plan = plan_in(folder)
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 0.5)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send)

        def stand_still(frame: int) -> None:
            if frame == 1:
                sent.exception(30.0)

        receiver = Receiver(join(sender, plan), 1, stand_still)
        with pytest.raises(TransferError, match=r"could not (send|hear)"):
            sent.result(30.0)
        with pytest.raises(TransferError, match="could not receive"):
            receiver.result(30.0)


def test_a_receiver_that_is_wanted_no_more_ends_before_its_next_frame(folder: Path) -> None:
    plan = plan_in(folder)
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 30.0)
    receiver = Receiver(join(sender, plan), 1, lambda _frame: receiver.abandon())
    with pytest.raises(TransferError, match=r"could not (send|hear)"):
        sender.send()
    with pytest.raises(TransferError, match="is wanted no more"):
        receiver.result(30.0)
