"""Weights, gradients and moments that leave the memory of the process and come back: to the bit, and all of them or none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tests.harness.ranks import on_new_ranks, on_ranks
from tests.unit.trainer.rank_trainers import groups_of, settings_of
from trainer.config.settings import Settings
from trainer.errors import OffloadFailed
from trainer.model import parallel
from trainer.model.offload import Where, give_back
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer

FULL = {"type": "grpo", "kl_coef": 0.1}
MIB = 2**20


def learn(settings: Settings, where: Where | None) -> dict[str, Tensor] | None:
    """Two batches, of which the second is half taken when all leaves and comes back: the weights that are published then."""
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    trainer.train(groups_of(0))
    batch = trainer.begin_batch()
    trainer.add_groups(batch, groups_of(1)[:2])
    assert any(weight.grad is not None for weight in trainer.model.parameters())
    if where is not None:
        weights = list(trainer.model.parameters())
        held = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
        held += [tensor for entry in trainer.optimizer.moments().values() for tensor in entry.values()]
        trainer.offload(where, settings.run.dir)
        assert not any(parallel.local(tensor).untyped_storage().nbytes() for tensor in held)
        with pytest.raises(RuntimeError, match="nothing can be computed before `onload`"):
            _ = trainer.policy
        trainer.onload()
    trainer.add_groups(batch, groups_of(1)[2:])
    trainer.step(batch)
    found = {name: tensor.clone() for name, tensor in trainer.gather_weights().items()}
    shutdown_ranks(trainer)
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype", "more"),
    [
        (1, "float32", {}),
        (2, "bfloat16", {"lora": {"rank": 3}}),
        pytest.param(2, "float32", {}, marks=pytest.mark.long),
    ],
)
def test_what_leaves_with_a_half_filled_gradient_comes_back_to_the_bit(
    exact_model: Path, tmp_path: Path, ranks: int, dtype: str, more: dict[str, Any]
) -> None:
    settings = settings_of(exact_model, tmp_path, FULL, dtype, more)
    settings = settings.model_copy(update={"batch": settings.batch.model_copy(update={"tokens": 20})})
    expected, *_ = on_ranks(ranks, learn, settings, None)
    for where in ("host", "disk"):
        found, *_ = on_ranks(ranks, learn, settings, where)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), (where, name)


def resident() -> int:
    """Bytes of memory that this process has and no file holds, as the kernel counts them."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in each)
    return int(line.split()[1]) * 1024


def measure(settings: Settings) -> tuple[list[int], int]:
    """Resident memory before, while all is away, and after; and the bytes of weights and moments."""
    trainer = RankTrainer.open(settings)
    trainer.train(groups_of(0))
    own = 3 * sum(weight.nbytes for weight in trainer.model.parameters())
    gc.collect()
    give_back("cpu")  # what the step needed is not a part of it
    seen = [resident()]
    trainer.offload("disk", settings.run.dir)
    seen.append(resident())
    trainer.onload()
    seen.append(resident())
    return seen, own


def test_the_kernel_sees_the_memory_go_and_come(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=384, n_layer=6, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    ((seen, own),) = on_new_ranks(1, measure, settings_of(tmp_path / "model", tmp_path / "run", {}))
    assert own > 100 * MIB
    before, away, after = seen
    assert before - away == pytest.approx(own, rel=0.05)
    assert after - away == pytest.approx(own, rel=0.05)


def refuse(settings: Settings) -> tuple[str, float]:
    """The error of a rank when only the first has the disk; and whether the weights have left."""
    trainer = RankTrainer.open(settings)
    trainer.in_rank_call = True  # each rank does it of its own accord
    place = settings.run.dir / "mine" if trainer.ranks.is_rank_zero else Path("/dev/null/nowhere")
    with pytest.raises(OffloadFailed) as failed:
        trainer.offload("disk", place)
    trainer.train(groups_of(0))
    return str(failed.value), float(trainer.offloaded)


def test_a_rank_that_finds_no_room_keeps_all_ranks_where_they_are(exact_model: Path, tmp_path: Path) -> None:
    for message, offloaded in on_ranks(2, refuse, settings_of(exact_model, tmp_path, {})):
        assert message.startswith(
            "weights and moments cannot leave ([gateway] offload): rank 1: NotADirectory"
        )
        assert not offloaded
