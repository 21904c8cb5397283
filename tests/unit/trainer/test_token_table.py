"""The table of a batch's tokens: each column against a plain forward pass of each path alone, in float64."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from headgate.types import Episode, Group, Node, TokenFlag
from tests.harness.gateways import RunningGateway
from tests.harness.plain_model import plain_logits
from tests.harness.ranks import on_ranks
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings
from tests.unit.trainer.runs import settings_of as settings_for
from tests.unit.trainer.trees import context_of, prompt, sampled
from trainer.config.settings import Settings
from trainer.data.details import DetailChoice
from trainer.model import pretrained
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer
from trainer.report.details import Details
from trainer.report.files import atomic_file, delete_oldest
from trainer.report.tokens import token_table, write

CAP, LOW, HIGH, BOUNDS, TEMPERATURE = 1.5, 0.2, 0.28, (0.5, 1.9), 0.7
ALGORITHM = {
    "type": "grpo", "importance_cap": CAP, "clip_low": LOW, "clip_high": HIGH, "mask_token": BOUNDS,
}  # fmt: skip


def settings_of(model: Path, work: Path, algorithm: Mapping[str, Any], tokens: int = 40) -> Settings:
    given: dict[str, Mapping[str, Any]] = {"batch": {"tokens": tokens}, "parallel": {"timeout_s": 60}}
    return offline_settings(model, work, algorithm=algorithm, **given)


def trainer_of(settings: Settings) -> RankTrainer:
    """A trainer in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pretrained.DTYPES, "float32", torch.float64)
        trainer = RankTrainer.open(settings)
    return trainer


def groups_of() -> list[Group]:
    """Branching episodes with tokens that may not be trained, of several versions; the rewards of group 2 are equal."""
    rng = np.random.default_rng(5)

    def turn(index: int, parent: int, at: int, n: int, flags: Sequence[int] | None = None) -> Node:
        node = sampled(
            index, parent, at, rng.integers(0, 250, n).tolist(), flags=flags, temperature=TEMPERATURE
        )
        logprobs = rng.uniform(-7.5, -4.0, n).astype(np.float32)
        return replace(
            node, logprobs=logprobs, versions=rng.integers(0, 3, n).astype(np.int32), call_id=f"call {index}"
        )

    groups = []
    for g in range(3):
        members = []
        for m in range(3):
            n = int(rng.integers(4, 9))
            flags = (
                [TokenFlag.LATE, TokenFlag.GREEDY | TokenFlag.ORPHANED] + [0] * (n - 2) if m == 1 else None
            )
            spoilt = turn(3, 2, 2, 4)
            spoilt.logprobs[1] = np.nan
            nodes = (
                prompt(0, -1, 0, rng.integers(0, 250, 3 + g).tolist()),
                turn(1, 0, 2, n, flags),
                prompt(2, 1, n, [5, 6]),
                spoilt,
                turn(4, 1, 2, 3),
                replace(turn(5, 0, 1, 2), mask_reason="abandoned"),
            )
            members.append(Episode(f"{g}-{m}", 0.5 if g == 2 else float(rng.normal()), nodes))
        groups.append(Group(f"g{g}", f"t{g}", 0, tuple(members)))
    return groups


REASONS = {int(TokenFlag.LATE): "late", int(TokenFlag.GREEDY | TokenFlag.ORPHANED): "greedy"}


def reference(trainer: RankTrainer, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The expected table, token by token, from the papers' formulas and the model's own forward pass."""
    rows = []
    for group in groups:
        rewards = np.array([episode.reward for episode in group.episodes])
        for episode in group.episodes:
            advantage = (episode.reward - rewards.mean()) / (rewards.std() + 1e-4)
            for node in episode.nodes:
                if node.sampled:
                    rows += rows_of(trainer, group.group_id, episode, node, advantage)
    return rows


def rows_of(
    trainer: RankTrainer, group: str, episode: Episode, node: Node, advantage: float
) -> list[dict[str, Any]]:
    context = context_of(episode, node)
    with torch.no_grad():
        logits = plain_logits(trainer.model, torch.tensor([context + node.ids.tolist()]))[0]
    rows = []
    for i, token in enumerate(node.ids.tolist()):
        recorded = float(node.logprobs[i])
        reason = node.mask_reason or REASONS.get(int(node.flags[i]), "")
        reason = reason or ("invalid_logprob" if np.isnan(recorded) else "" if advantage else "equal_rewards")
        row = {
            "group_id": group, "episode_id": episode.episode_id, "call_id": f"call {node.index}",
            "node": node.index, "position": len(context) + i, "token": token,
            "version": int(node.versions[i]), "recorded_logprob": recorded, "advantage": advantage,
            "mask_reason": reason or None,
            **dict.fromkeys(("logprob", "entropy", "weight", "mismatch", "clipped")),
        }  # fmt: skip
        if not reason:
            scaled = (logits[len(context) + i - 1] / float(np.float32(TEMPERATURE))).numpy()
            probabilities = np.exp(scaled - scaled.max())
            probabilities /= probabilities.sum()
            logprob = float(np.log(probabilities[token]))
            ratio = np.exp(logprob - recorded)
            kept = BOUNDS[0] <= ratio <= BOUNDS[1]
            row |= {
                "logprob": logprob,
                "entropy": float(-(probabilities * np.log(probabilities)).sum()),
                "weight": min(ratio, CAP) if kept else 0.0,
                "mismatch": logprob - recorded,
                "clipped": bool(ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW),
                "mask_reason": None if kept else "ratio",
            }
        rows.append(row)
    return rows


def table_of(trainer: RankTrainer, groups: Sequence[Group]) -> pa.Table:
    """The table of one step."""
    batch = trainer.begin_batch(DetailChoice(tokens=True))
    for group in groups:
        trainer.add_groups(batch, [group])
    trainer.step(batch)
    return token_table(batch.details)


def assert_table(table: pa.Table, expected: Sequence[Mapping[str, Any]]) -> None:
    rows = table.to_pylist()
    assert len(rows) == len(expected) > 0
    for row, wanted in zip(rows, expected, strict=True):
        for name, value in wanted.items():
            if isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=1e-10, abs=1e-10, nan_ok=True), (name, wanted)
            else:
                assert row[name] == value, (name, wanted)


@pytest.mark.parametrize("tokens", [16, 40, 10_000])
def test_each_column_is_that_of_a_plain_forward_pass_of_every_path(
    exact_model: Path, tmp_path: Path, tokens: int
) -> None:
    groups = groups_of()
    trainer = trainer_of(settings_of(exact_model, tmp_path, ALGORITHM, tokens))
    expected = reference(trainer, groups)
    reasons = Counter(row["mask_reason"] for row in expected)
    assert reasons.keys() == {
        None, "ratio", "late", "greedy", "abandoned", "invalid_logprob", "equal_rewards"
    }  # fmt: skip
    assert {row["clipped"] for row in expected} == {True, False, None}
    assert_table(table_of(trainer, groups), expected)


def test_a_group_without_advantage_that_is_trained_has_its_figures(exact_model: Path, tmp_path: Path) -> None:
    """An entropy bonus trains it."""
    trainer = trainer_of(settings_of(exact_model, tmp_path, {**ALGORITHM, "entropy_coef": 0.01}))
    rows = table_of(trainer, groups_of()).to_pylist()
    equal = [row for row in rows if row["group_id"] == "g2"]
    trained = [row for row in equal if row["logprob"] is not None]
    assert Counter(row["mask_reason"] for row in trained).keys() == {None, "ratio"}
    assert all(row["advantage"] == 0 and row["entropy"] > 0 for row in trained)
    assert "equal_rewards" not in {row["mask_reason"] for row in equal}


def test_with_minibatches_each_token_has_the_figures_of_its_own_step(
    exact_model: Path, tmp_path: Path
) -> None:
    """The second minibatch is trained by weights that the first has changed, and weighed by both ratios."""
    algorithm = {"type": "ppo", "minibatches": 2, "importance_cap": CAP, "clip_low": LOW, "clip_high": HIGH}
    groups = groups_of()[:2]
    trainer = trainer_of(settings_of(exact_model, tmp_path, algorithm))
    weights: list[dict[str, torch.Tensor]] = []
    step = trainer.optimizer.step

    def watched() -> None:
        weights.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        step()

    trainer.optimizer.step = watched  # type: ignore[method-assign]
    table = table_of(trainer, groups).to_pylist()
    expected: list[dict[str, Any]] = []
    proximal: list[float] = []
    for group, state in zip(groups, weights, strict=True):
        trainer.model.load_state_dict(weights[0], strict=False)
        proximal += [row["logprob"] for row in reference(trainer, [group])]
        trainer.model.load_state_dict(state, strict=False)
        expected += reference(trainer, [group])
    moved = 0
    for row, wanted, before in zip(table, expected, proximal, strict=True):
        if wanted["logprob"] is None:
            continue
        assert row["logprob"] == pytest.approx(wanted["logprob"], rel=1e-9)
        moved += before != wanted["logprob"]
        weight = min(np.exp(before - wanted["recorded_logprob"]), CAP) * np.exp(wanted["logprob"] - before)
        assert row["weight"] == pytest.approx(weight, rel=1e-9)
    assert moved


def table_on_ranks(settings: Settings) -> list[dict[str, Any]] | None:
    trainer = trainer_of(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    table = table_of(trainer, groups_of())
    shutdown_ranks(trainer)
    return table.to_pylist()


@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks_write_the_table_of_one(exact_model: Path, tmp_path: Path, context: int) -> None:
    one, two = (settings_of(exact_model, tmp_path / name, ALGORITHM) for name in ("1", "2"))
    two = two.model_copy(update={"parallel": two.parallel.model_copy(update={"context": context})})
    (expected,) = on_ranks(1, table_on_ranks, one)
    found, other = on_ranks(2, table_on_ranks, two)
    assert other is None
    assert any(row["logprob"] is not None for row in expected)
    assert_table(pa.Table.from_pylist(found), expected)


async def test_a_run_writes_the_tokens_of_every_so_many_steps(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    """Read by pandas, as people will, and held against the step's metrics."""
    settings = settings_for(gateway, tiny_model, tmp_path, steps=3)
    report = settings.report.model_copy(update={"tokens_every": 2, "samples_every": 0})
    settings = settings.model_copy(update={"report": report})
    async with episodes(gateway), loop_of(gateway, settings) as loop, within("the trainer is through"):
        await loop.train()
    records = [json.loads(line) for line in (settings.run.dir / "metrics.jsonl").open()]
    folder = settings.run.dir / "tokens"
    assert [path.name for path in sorted(folder.iterdir())] == ["step-000001.parquet", "step-000003.parquet"]
    assert not (settings.run.dir / "samples").exists()
    for step in (1, 3):
        path, record = folder / f"step-{step:06d}.parquet", records[step - 1]
        table = pd.read_parquet(path)
        trained = table[table.logprob.notna()]
        assert len(trained) == record["trained_tokens"] > 0
        assert (table.mask_reason == "equal_rewards").sum() == record["skipped_tokens"]
        assert trained.entropy.mean() == pytest.approx(record["entropy"], rel=1e-4)
        assert trained.weight.mean() == pytest.approx(record["importance_weight"], rel=1e-4)
        assert (-trained.mismatch).mean() == pytest.approx(record["kl_recorded_k1"], rel=1e-4)
        assert json.loads(pq.read_schema(path).metadata[b"headgate"]) == {
            "step": step, "batch": step - 1, "version": step
        }  # fmt: skip


def test_a_table_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "tokens" / "step-000001.parquet"

    def fails() -> None:
        with atomic_file(path) as temporary:
            temporary.write_bytes(b"PAR1 half a table")
            assert not path.exists()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert list(path.parent.iterdir()) == []
    for metadata in ({"step": 1}, {"step": 2}):
        write(path, pa.table({"token": [1]}), metadata)
    assert json.loads(pq.read_schema(path).metadata[b"headgate"]) == {"step": 2}
    assert list(path.parent.iterdir()) == [path]


def test_by_default_one_step_in_ten_has_a_table(exact_model: Path, tmp_path: Path) -> None:
    details = Details(offline_settings(exact_model, tmp_path))
    assert [step for step in range(1, 31) if details.choice_of(step).tokens] == [1, 11, 21]


def test_the_oldest_tables_are_deleted_beyond_the_limit_and_the_newest_is_kept(tmp_path: Path) -> None:
    # A run that goes back to a checkpoint writes step 2 after step 3.
    paths = [tmp_path / f"step-{step:06d}.parquet" for step in (1, 3, 2)]
    for age, path in enumerate(paths):
        path.write_bytes(bytes(100))
        os.utime(path, (age, age))
    other = tmp_path / "notes.txt"
    other.write_bytes(bytes(1000))
    delete_oldest(paths[2], 200)
    assert {*tmp_path.iterdir()} == {*paths[1:], other}
    delete_oldest(paths[2], 50)
    assert {*tmp_path.iterdir()} == {paths[2], other}
