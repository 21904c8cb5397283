"""Bytes from a sender to receivers over real gloo, and what the receivers accept."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from headgate.weights.manifest import entry_of, plan_of
from headgate.weights.plugin.headgate_transfer import groups, handles, shared, wire
from headgate.weights.plugin.headgate_transfer.groups import TransferError, refusal
from headgate.weights.plugin.headgate_transfer.wire import Join, Receiver, Sender, frames_of

NAME = "model.safetensors"
TENSORS = {
    "layers.0.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layers.1.weight": torch.arange(10, dtype=torch.bfloat16),
    "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a version whose pieces are too many for one frame."""
    monkeypatch.setattr(wire, "FRAME", 64)
    save_file(TENSORS, tmp_path / NAME)
    return tmp_path


def plan_in(folder: Path) -> Any:
    return plan_of({NAME: entry_of(folder / NAME)})


def join(sender: Sender, plan: Any, workers: int = 1, timeout_s: float = 30.0) -> Join:
    place = 7, sender.backend, "127.0.0.1", sender.port, workers + 1, plan, timeout_s
    return Join(*place, lanes=sender.lanes)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group wait little for each step, but long for all ranks to be there."""

    def opened(*place: Any) -> groups.TransferGroup:
        group: Any = groups.open_group(*place)
        group._timeout_s, group._timeout = 0.5, timedelta(seconds=0.5)
        return group  # type: ignore[no-any-return]

    monkeypatch.setattr(wire, "open_group", opened)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's names, with gloo behind them: all of our own code of that way runs."""

    def nccl(store: Any, rank: int, size: int, _options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))

    nccl.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(groups.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(groups.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(groups.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(groups.devices, "uuid", lambda index: f"GPU-{index}")
    for module in (groups, wire):
        monkeypatch.setattr(module, "accelerator", lambda _lane=None: torch.device("cpu"))


@pytest.mark.parametrize("backend", ["gloo", "nccl", "nccl_m2n", "ipc"])
def test_every_worker_of_an_engine_has_every_tensor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend.startswith("nccl"):
        on_the_cpu(monkeypatch)
    plan = plan_in(folder)
    frames = list(frames_of(plan))
    assert len(frames) > 2
    assert [frame.start for frame in frames] == [sum(f.size for f in frames[:i]) for i in range(len(frames))]
    sender = Sender(folder, plan, backend, "127.0.0.1", 2, 30.0)
    assert sender.lanes == (2 if backend == "nccl_m2n" else 1)
    receivers = [Receiver(join(sender, plan, 2), rank) for rank in (1, 2)]
    sender.send()
    for receiver in receivers:
        found = dict(receiver.result(30.0).tensors())
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].tolist()) == (tensor.dtype, tensor.tolist())


@pytest.mark.parametrize(("backend", "lanes"), [("gloo", 1), ("gloo", 2), ("ipc", 1)])
def test_bytes_that_are_not_the_manifests_are_refused_and_both_sides_name_them(
    folder: Path, backend: str, lanes: int
) -> None:
    plan = plan_in(folder)
    file = folder / NAME
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    sender = Sender(folder, plan, backend, "127.0.0.1", 1, 30.0, lanes)
    receiver = Receiver(join(sender, plan), 1)
    with pytest.raises(TransferError, match=r"refused what it received: model.safetensors: the \d+ bytes at"):
        sender.send()
    with pytest.raises(TransferError, match="are not the manifest's"):
        receiver.result(30.0)


def test_a_sender_of_another_version_is_not_joined(folder: Path) -> None:
    plan = plan_in(folder)
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 30.0)
    other = {NAME: [(size, "0" * 64) for size, _ in plan[NAME]]}
    receiver = Receiver(join(sender, other), 1)
    with pytest.raises(TransferError, match="the sender has another version 7"):
        receiver.result(30.0)
    sender._timeout_s = 0.5  # no receiver joins
    with pytest.raises(TransferError, match="could not join the group"):
        sender.send()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_no_side_waits_longer_than_its_deadline_for_a_silent_peer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The receiver stops before its second frame, as if its machine stood still; the sender then leaves it."""
    if backend == "nccl":
        on_the_cpu(monkeypatch)
    hurry(monkeypatch)
    plan = plan_in(folder)
    sender = Sender(folder, plan, backend, "127.0.0.1", 1, 30.0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send)

        def stand_still(frame: int) -> None:
            if frame == 1:
                sent.exception(30.0)

        receiver = Receiver(join(sender, plan), 1, stand_still)
        with pytest.raises(TransferError, match=r"could not (send|confirm)"):
            sent.result(30.0)
        with pytest.raises(TransferError, match=r"could not (receive|hear)"):
            receiver.result(30.0)


def test_a_sender_does_not_wait_longer_for_readers_of_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    plan = plan_in(folder)
    sender = Sender(folder, plan, "ipc", "127.0.0.1", 1, 30.0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send)
        receiver = Receiver(join(sender, plan), 1, lambda frame: frame and sent.exception(30.0))
        with pytest.raises(TransferError, match=r"could not (send|confirm)"):
            sent.result(30.0)
        receiver.abandon()


def test_what_an_installation_cannot_do_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal("gloo") == ""
    assert "none of gloo, nccl, nccl_m2n, ipc" in refusal("rdma")
    monkeypatch.setattr(groups.dist, "is_nccl_available", lambda: False)
    assert "'nccl' needs NCCL" in refusal("nccl")
    assert Sender(folder, plan_in(folder), "auto", "127.0.0.1", 1, 30.0).backend == "gloo"
    monkeypatch.setattr(groups.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(groups.torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransferError, match="'nccl_m2n' needs an accelerator"):
        Sender(folder, plan_in(folder), "nccl_m2n", "127.0.0.1", 1, 0.5)
    with pytest.raises(ValueError, match="'nccl' needs an accelerator"):
        Join(7, "nccl", "127.0.0.1", 1, 2, {}, 0.5)
    monkeypatch.setattr(groups, "SHARED", folder / "missing")
    assert "'ipc' needs" in refusal("ipc")


def worker_of(gpu: str, memory: str | None = None) -> dict[str, str]:
    return {"gpu": gpu, "memory": groups.devices.shared_memory() if memory is None else memory}


@pytest.mark.parametrize(
    ("workers", "way"),
    [
        ([], "gloo"),
        ([worker_of("GPU-2"), worker_of("GPU-3")], "nccl_m2n"),
        ([worker_of("GPU-2"), worker_of("GPU-1")], "nccl"),
        ([worker_of("GPU-0")], "ipc"),
        ([worker_of("GPU-0"), worker_of("GPU-2", "another container's")], "gloo"),
        ([worker_of("")], "gloo"),
    ],
)
def test_auto_takes_nccl_only_where_no_gpu_is_known_to_be_at_both_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, workers: list[dict[str, str]], way: str
) -> None:
    """The sender has GPU-0 and GPU-1, and `nccl` uses the first alone."""
    on_the_cpu(monkeypatch)
    assert Sender(folder, plan_in(folder), "auto", "127.0.0.1", 1, 30.0, devices=workers).backend == way


def test_shared_memory_without_room_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(groups.devices, "room", lambda: 2**24)
    assert groups.chosen("auto", [worker_of("GPU-0")]) == "gloo"


def test_nccl_on_one_gpu_is_refused_before_any_rank_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(monkeypatch)
    with pytest.raises(TransferError, match=r"'nccl' needs different GPUs .* both have GPU-0: set"):
        Sender(folder, plan_in(folder), "nccl", "127.0.0.1", 1, 30.0, devices=[worker_of("GPU-0")])


def test_shared_memory_that_is_not_of_this_machine_is_not_joined(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver does not have the memory that the sender names."""
    plan, wait_for = plan_in(folder), shared.Ring._wait_for

    def elsewhere(group: shared.Ring, key: str) -> str:
        return str(folder / "elsewhere") if key == "memory" else wait_for(group, key)

    monkeypatch.setattr(shared.Ring, "_wait_for", elsewhere)
    sender = Sender(folder, plan, "ipc", "127.0.0.1", 1, 30.0)
    sender._timeout_s = 1.0  # no receiver opens it
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send)
        with pytest.raises(TransferError, match="must be on this machine"):
            Receiver(join(sender, plan), 1).result(30.0)
        with pytest.raises(TransferError, match="must be on this machine"):
            sent.result(30.0)
    assert not list(handles.SHARED.glob(f"{handles.NAME}{os.getpid()}-*"))


def test_memory_that_a_killed_sender_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "SHARED", tmp_path)
    gone, here = (tmp_path / f"{handles.NAME}{pid}-x" for pid in (2**22 + 1, os.getpid()))
    for path in (gone, here):
        path.touch()
    handles.sweep()
    assert (gone.exists(), here.exists()) == (False, True)


def test_a_receiver_that_is_wanted_no_more_ends_before_its_next_frame(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    plan = plan_in(folder)
    sender = Sender(folder, plan, "gloo", "127.0.0.1", 1, 30.0)
    receiver = Receiver(join(sender, plan), 1, lambda _frame: receiver.abandon())
    with pytest.raises(TransferError, match=r"could not (send|confirm)"):
        sender.send()
    with pytest.raises(TransferError, match="is wanted no more"):
        receiver.result(30.0)
