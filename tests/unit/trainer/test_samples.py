"""The sample of a step's episodes: which they are, what each row reports of its call, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from headgate.types import Episode, Group, Node, TokenFlag
from tests.harness.gateways import RunningGateway
from tests.harness.waiting import within
from tests.unit.trainer.rollouts import episodes
from tests.unit.trainer.runs import loop_of, offline_settings, settings_of
from tests.unit.trainer.trees import group, prompt, sampled
from trainer.cli import app
from trainer.data.batch import Batch
from trainer.data.details import BatchDetails, DetailChoice
from trainer.report.details import Details
from trainer.report.files import samples_file
from trainer.report.samples import LONGEST, read, samples_of, write


def spelt(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def details_of(groups: Sequence[Group], wanted: int) -> BatchDetails:
    """The groups, each episode with its number as the advantage of its first reply."""
    details = BatchDetails(DetailChoice(groups=wanted))
    for each in groups:
        details.add(each, [{1: float(i)} for i in range(len(each.episodes))])
    return details


def answered(node: Node, **changes: object) -> Node:
    return replace(node, **{"finish_reason": "stop", **changes})  # type: ignore[arg-type]


def test_each_call_is_a_row_with_what_was_new_to_it() -> None:
    """Two turns, of which the second saw a tool's answer; a branch without a reply to a client is not a call."""
    tree = (
        prompt(0, -1, 0, [1, 2, 3, 4]),
        answered(sampled(1, 0, 3, [5, 6], flags=[0, TokenFlag.LATE]), reward=0.25),
        prompt(2, 1, 2, [7]),
        prompt(3, 2, 1, [8, 9]),
        answered(sampled(4, 3, 1, [10, 11, 12]), finish_reason="length"),
        sampled(5, 0, 2, [13], mask_reason="abandoned"),
    )
    tree[4].versions[:] = [3, 5, 4]
    judged = Group("g", "t", 0, (Episode("e", 1.5, tree),))
    details = BatchDetails(DetailChoice(groups=1))
    details.add(judged, [{1: -0.5, 4: 0.75}])
    first, second = samples_of(details, 4, spelt)
    assert (first.turn, first.prompt, first.reply, first.tokens) == (1, "1 2 3", "5 6", 2)
    assert (first.reward, first.call_reward, first.advantage, first.versions) == (1.5, 0.25, -0.5, "0")
    assert (first.finish_reason, first.mask_reason) == ("stop", "late (1 of 2)")
    assert (second.turn, second.prompt, second.reply) == (2, "7 8", "10 11 12")
    assert (second.call_reward, second.advantage, second.versions) == (None, 0.75, "3-5")
    assert (second.finish_reason, second.mask_reason) == ("length", "")


def test_the_best_and_the_worst_of_a_few_groups_are_shown_whatever_their_order() -> None:
    groups = [group(f"g{i}", [0.0, 1.0, 0.5, 0.2]) for i in range(9)]
    shown = samples_of(details_of(groups, 2), 4, spelt)
    assert [sample.reward for sample in shown] == [1.0, 0.0, 1.0, 0.0]
    assert [sample.advantage for sample in shown] == [1.0, 0.0, 1.0, 0.0]
    assert samples_of(details_of(groups[::-1], 2), 4, spelt) == shown
    assert len(details_of(groups, 2).groups) == 2, "no more groups are held than are shown"
    assert len(samples_of(details_of(groups, 2), 3, spelt)) == 3
    chosen = {sample.group_id for i in range(9) for sample in samples_of(details_of(groups[i:], 1), 2, spelt)}
    assert len(chosen) > 1, "not always the first that came"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    nodes = (prompt(0, -1, 0, [1]), sampled(1, 0, 1, list(range(10_000))))
    details = BatchDetails(DetailChoice(groups=1))
    details.add(Group("g", "t", 0, (Episode("e", 1.0, nodes),)), [{}])
    (sample,) = samples_of(details, 1, spelt)
    whole = spelt(range(10_000))
    assert len(whole) > 2 * LONGEST
    assert sample.reply.startswith(whole[: LONGEST // 2]) and sample.reply.endswith(whole[-LONGEST // 2 :])
    assert f"[... {len(whole) - LONGEST} characters ...]" in sample.reply


def test_without_a_tokenizer_of_the_model_a_text_is_its_token_ids(exact_model: Path, tmp_path: Path) -> None:
    settings = offline_settings(exact_model, tmp_path)
    details = Details(settings)
    batch = Batch(0, settings.algorithm.create(), 100, details=details.choice_of(1))
    assert list(batch.add_groups([group("g", [1.0])])) == []
    details.write(1, batch)
    (row,) = read(samples_file(tmp_path, 1))
    assert row["reply"] == spelt(group("g", [1.0]).episodes[0].nodes[1].ids.tolist())


async def test_a_run_writes_samples_that_the_command_line_prints(
    gateway: RunningGateway, tiny_model: Path, tmp_path: Path
) -> None:
    settings = settings_of(gateway, tiny_model, tmp_path, steps=3)
    report = settings.report.model_copy(update={"samples_every": 2, "tokens_every": 0})
    settings = settings.model_copy(update={"report": report})
    async with episodes(gateway), loop_of(gateway, settings) as loop, within("the trainer is through"):
        await loop.train()
    folder = settings.run.dir / "samples"
    assert [path.name for path in sorted(folder.iterdir())] == ["step-000001.jsonl", "step-000003.jsonl"]
    assert not (settings.run.dir / "tokens").exists()
    rows = [json.loads(line) for line in (folder / "step-000003.jsonl").read_text().splitlines()]
    assert {row["versions"] for row in rows} <= {"0", "1", "2"}
    found = await gateway.admin.episodes(limit=1000)
    rewards = {episode["episode_id"]: episode["reward"] for episode in found}
    assert all(row["reward"] == rewards[row["episode_id"]] for row in rows)
    assert all("<|im_start|>user" in row["prompt"] for row in rows if row["turn"] == 1)
    printed = CliRunner().invoke(app, ["samples", str(settings.run.dir)])
    assert printed.exit_code == 0
    for row in rows:
        assert f"## Episode {row['episode_id']}, call {row['turn']}" in printed.output
    other = CliRunner().invoke(app, ["samples", str(settings.run.dir), "--step", "1"])
    assert other.output != printed.output
    missing = CliRunner().invoke(app, ["samples", str(settings.run.dir), "--step", "2"])
    assert (missing.exit_code, missing.output) == (
        2, f"{settings.run.dir}: no samples of step 2; steps with samples: 1, 3\n"
    )  # fmt: skip


def test_what_is_printed_cannot_command_a_terminal_or_leave_its_fence(tmp_path: Path) -> None:
    nodes = (prompt(0, -1, 0, [1]), sampled(1, 0, 1, [2]))
    details = BatchDetails(DetailChoice(groups=1))
    details.add(Group("g\x1b]0;", "t", 0, (Episode("e", 1.0, nodes),)), [{}])
    texts = {(1,): "before\x1b[2Jafter\x07\ttab", (2,): "````\nstill inside"}
    write(samples_file(tmp_path, 7), samples_of(details, 1, lambda ids: texts[tuple(ids)]))
    printed = CliRunner().invoke(app, ["samples", str(tmp_path)]).output
    assert "\x1b" not in printed and "\x07" not in printed
    assert "before[2Jafter\ttab" in printed
    assert "`````\n````\nstill inside\n`````\n" in printed


def test_the_error_for_a_folder_without_samples_names_the_setting_that_writes_them(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert done.exit_code == 2
    assert "no samples of any step; [report] samples_every = 10 writes them" in done.output
