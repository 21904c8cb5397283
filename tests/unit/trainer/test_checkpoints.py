"""What a checkpoint detects of damage, of a full disk and of another model, and what writing one costs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.harness.ranks import on_ranks
from tests.unit.trainer.rank_trainers import groups_of, settings_of
from trainer.config.parallel import ParallelSettings
from trainer.config.settings import Settings
from trainer.errors import CheckpointDamaged, CheckpointError
from trainer.loop.checkpoints import is_due
from trainer.model import parallel, shards
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer


def spoil_bytes(checkpoint: Path, change: Callable[[bytearray], None]) -> None:
    file = sorted((checkpoint / "tensors").iterdir())[-1]
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)


def halve(data: bytearray) -> None:
    del data[len(data) // 2 :]


def flip(data: bytearray) -> None:
    data[-100] ^= 0x40


def zero(data: bytearray) -> None:
    data[-40_000:] = bytes(40_000)


def spoil_state(checkpoint: Path, text: str) -> None:
    (checkpoint / "state.json").write_text(text)


def change_state(checkpoint: Path, **values: Any) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    spoil_state(checkpoint, json.dumps(state | values))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a shard cut in two": lambda at: spoil_bytes(at, halve),
    "an empty shard": lambda at: spoil_bytes(at, bytearray.clear),
    "a flipped bit": lambda at: spoil_bytes(at, flip),
    "40 kB of zeros": lambda at: spoil_bytes(at, zero),
    "no shard": lambda at: sorted((at / "tensors").iterdir())[-1].unlink(),
    "a shard of another checkpoint": lambda at: shutil.copy(
        next((at / "tensors").iterdir()), at / "tensors" / "shard-00009.safetensors"
    ),
    "no tensors": lambda at: shutil.rmtree(at / "tensors"),
    "an empty state": lambda at: spoil_state(at, ""),
    "half a state": lambda at: spoil_state(at, (at / "state.json").read_text()[:100]),
    "a state that is a list": lambda at: spoil_state(at, "[1,2]"),
    "a state of another version": lambda at: change_state(at, version=7),
    "a state of wrong types": lambda at: change_state(at, format="x", files=3),
    "no state": lambda at: (at / "state.json").unlink(),
}


def with_two(settings: Settings) -> RankTrainer:
    """A trainer at version 2 with checkpoints of versions 1 and 2."""
    trainer = RankTrainer.open(settings)
    for version in range(2):
        trainer.train(groups_of(version))
        trainer.save_checkpoint()
    return trainer


@pytest.fixture(scope="module")
def two_checkpoints(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_two(settings_of(tiny_model, tmp_path_factory.mktemp("two"), {})).checkpoints


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named_and_the_older_checkpoint_is_whole(
    tiny_model: Path, two_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    settings = settings_of(tiny_model, tmp_path, {})
    newest = Path(shutil.copytree(two_checkpoints, tmp_path / "checkpoints")) / "v000002"
    DAMAGE[name](newest)
    with pytest.raises(CheckpointDamaged) as found:
        RankTrainer.open(settings)
    message = str(found.value)
    assert "\n" not in message and "Errno" not in message
    assert message.startswith(f"{newest} is damaged: ") and "--from-older" in message
    trainer = RankTrainer.open(settings, older=True)
    assert (trainer.version, trainer.damaged) == (1, [newest])
    trainer.rename_damaged()
    assert RankTrainer.open(settings).version == 1
    assert newest.with_name("v000002.damaged").is_dir(), "nothing is deleted"


def test_no_whole_checkpoint_is_an_error_and_not_a_fresh_start(
    tiny_model: Path, two_checkpoints: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_model, tmp_path, {})
    directory = Path(shutil.copytree(two_checkpoints, tmp_path / "checkpoints"))
    for version in (1, 2):
        DAMAGE["a flipped bit"](directory / f"v00000{version}")
    with pytest.raises(
        CheckpointDamaged, match=r"v000002 is damaged: .* older ones is whole either: restore its"
    ):
        RankTrainer.open(settings, older=True)


def opened_on_two(settings: Settings) -> tuple[str, int, float]:
    """The error of a rank about a damaged newest checkpoint, and the version and a weight of the older one."""
    message = ""
    try:
        RankTrainer.open(settings)
    except CheckpointDamaged as error:
        message = str(error)
    trainer = RankTrainer.open(settings, older=True)
    weight = parallel.whole(next(trainer.model.parameters()).detach())
    return message, trainer.version, float(weight.double().sum())


def written_on_two(settings: Settings) -> None:
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        return serve_commands(trainer)
    for version in range(2):
        trainer.train(groups_of(version))
        trainer.begin_checkpoint()
    trainer.checkpoint_written()
    return shutdown_ranks(trainer)


@pytest.mark.parametrize(
    "name",
    [
        "a flipped bit",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("a state that is a list", "no shard")),
    ],
)
def test_two_ranks_agree_on_damage_and_on_the_older_checkpoint(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    settings = settings_of(tiny_model, tmp_path, {})
    on_ranks(2, written_on_two, settings)
    newest = tmp_path / "checkpoints" / "v000002"
    assert len(list((newest / "tensors").iterdir())) == 2
    DAMAGE[name](newest)
    first, second = on_ranks(2, opened_on_two, settings)
    assert first == second
    assert first[0].startswith(f"{newest} is damaged: ") and first[1] == 1


def test_every_file_is_hashed_as_it_was_written_and_is_plain_safetensors(
    tiny_model: Path, tmp_path: Path
) -> None:
    trainer = RankTrainer.open(settings_of(tiny_model, tmp_path, {}))
    trainer.train(groups_of(0))
    path = trainer.save_checkpoint()
    (file,) = (path / "tensors").iterdir()
    state = json.loads((path / "state.json").read_text())
    content = file.read_bytes()
    assert state["files"] == [
        {"name": file.name, "size": len(content), "blake3": blake3(content).hexdigest()}
    ]
    stored = load_file(file)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(stored[f"weight/{name}"], weight), name


def test_a_write_takes_no_memory_beyond_the_tensors(tmp_path: Path) -> None:
    """torch's own writer makes one object of all bytes: 32 MB more here."""
    ranks = parallel.join(ParallelSettings(), "cpu")
    tensors = {f"w{i}": torch.randn(2**20) for i in range(8)}
    shards.write(tmp_path / "warm", {"w": torch.zeros(1)}, ranks)
    tracemalloc.start()
    shards.write(tmp_path / "tensors", tensors, ranks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert all(tensor.untyped_storage().resizable() for tensor in tensors.values()), (
        "they can still be offloaded"
    )
    found = {name: torch.zeros(2**20) for name in tensors}
    shards.read(tmp_path / "tensors", found, ranks)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_copy_of_a_state_is_made_in_the_memory_of_the_copy_before() -> None:
    copy, source = shards.HostCopy(), {"w": torch.randn(9), "step": torch.tensor(3.0)}
    first = copy.copy(source)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    source["w"].add_(1.0)
    assert not torch.equal(first["w"], source["w"])
    second = copy.copy(source)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert all(torch.equal(second[name], tensor) for name, tensor in source.items())


# Disks


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = with_two(settings_of(tiny_model, tmp_path, {}))
    trainer.train(groups_of(2))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError) as found:
        trainer.save_checkpoint()
    message = str(found.value)
    assert "\n" not in message and "Errno" not in message
    assert message.startswith(f"{trainer.checkpoints / 'v000003'} cannot be written: the disk of")
    assert "make room" in message
    assert sorted(path.name for path in trainer.checkpoints.glob("*v*")) == [
        ".v000002.whole", "v000001", "v000002",
    ]  # fmt: skip
    monkeypatch.undo()
    trainer.save_checkpoint()


def fills_up(settings: Settings) -> list[str]:
    """The errors of a rank while the disk fills up as the second one writes, and again while the first one begins."""
    trainer, messages = RankTrainer.open(settings), []
    for failing in ("second", "first"):
        with pytest.MonkeyPatch.context() as patch:
            if failing == "second" and not trainer.ranks.is_rank_zero:
                patch.setattr(os, "fsync", full)
            if failing == "first":
                patch.setattr(Path, "mkdir", full)
            trainer.in_rank_call = True
            try:
                trainer.save_checkpoint()
            except CheckpointError as error:
                messages.append(str(error))
    return messages


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_two_ranks_agree_on_a_full_disk_and_leave_nothing(tiny_model: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_model, tmp_path, {})
    (tmp_path / "checkpoints").mkdir()
    first, second = on_ranks(2, fills_up, settings)
    free = r"[\d.]+ GB are free"  # each rank looks at a moment of its own
    assert [re.sub(free, "", one) for one in first] == [re.sub(free, "", one) for one in second]
    assert len(first) == 2
    for message in first:
        assert "\n" not in message and "v000000 cannot be written: the disk of" in message
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    trainer = RankTrainer.open(settings_of(tiny_model, tmp_path, {}))
    trainer.checkpoints.write_text("no folder")
    with pytest.raises(
        CheckpointError, match=r"v000000 cannot be written: (File exists|Not a directory)"
    ) as found:
        trainer.save_checkpoint()
    assert "\n" not in str(found.value) and "Errno" not in str(found.value)


# The model that a run began with


def model_of(path: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 256,
        "n_positions": 128,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
    }
    GPT2LMHeadModel(GPT2Config(**sizes | changes)).save_pretrained(path)
    return path


KL, ADAPTERS = {"type": "grpo", "kl_coef": 0.1}, {"lora": {"rank": 2}}


@pytest.mark.parametrize(
    ("algorithm", "more", "what"),
    [({}, ADAPTERS, r"\[model.lora\]"), (KL, {}, "reference of the KL term"), ({}, {}, None)],
)
def test_other_base_weights_are_refused_where_something_rests_on_them(
    tmp_path: Path, algorithm: dict[str, Any], more: dict[str, Any], what: str | None
) -> None:
    model = model_of(tmp_path / "model", 1)
    settings = settings_of(model, tmp_path / "run", algorithm, more=more)
    with_two(settings)
    assert RankTrainer.open(settings).version == 2
    stored = load_file(model / "model.safetensors")
    stored["transformer.h.0.mlp.c_fc.weight"][16:24] += 0.01
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    if what is None:
        assert RankTrainer.open(settings).version == 2, "all weights are in the checkpoint"
        return
    with pytest.raises(
        CheckpointError, match=rf"v000002 began with other weights than .*{what}.* change it back"
    ):
        RankTrainer.open(settings)


def test_another_config_is_refused_by_its_key(tmp_path: Path) -> None:
    settings = settings_of(model_of(tmp_path / "model", 1), tmp_path / "run", {})
    with_two(settings)
    model_of(tmp_path / "model", 1, n_head=4, use_cache=False)
    with pytest.raises(
        CheckpointError, match=r"v000002.*in config.json n_head is 4 and was 2; change it back"
    ):
        RankTrainer.open(settings)


# How often


@pytest.mark.parametrize(
    ("every", "steps", "since", "since_s", "save_s", "due"),
    [
        (3, 6, 3, 0.0, 99.0, True),
        (3, 7, 1, 9e9, 0.0, False),
        ("auto", 1, 1, 0.0, None, True),
        ("auto", 9, 4, 1999.0, 100.0, False),
        ("auto", 9, 4, 2000.0, 100.0, True),
        ("auto", 100, 99, 200.0, 100.0, False),
        ("auto", 101, 100, 200.0, 100.0, True),
    ],
)
def test_saving_costs_at_most_a_twentieth_of_the_time(
    every: Any, steps: int, since: int, since_s: float, save_s: float | None, due: bool
) -> None:
    assert is_due(every, steps, since, since_s, save_s) is due
