"""The matrix of families: its findings for one that is accepted, one that is not, and one that transformers does not build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bench.families import __main__ as families
from bench.families import measure, replay
from bench.families.configs import FAMILIES, Family
from bench.families.measure import Found
from bench.families.page import page
from trainer.data.packing import MicroBatch
from trainer.data.tree import Row
from trainer.errors import ConfigError

KEYS = {
    "verdict",
    "why",
    "gap",
    "gradient",
    "export",
    "adapter",
    "replay_gap",
    "packed_gap",
    "expert_ranks_gap",
}


def test_the_last_line_has_each_familys_findings(capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["qwen3", "bloom", "qwen3_moe", "lfm2", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["families"]
    assert list(found) == ["qwen3", "bloom", "qwen3_moe", "lfm2"]
    assert all(set(each) == KEYS for each in found.values())
    qwen, bloom = found["qwen3"], found["bloom"]
    assert (qwen["verdict"], qwen["why"], qwen["export"], qwen["adapter"]) == ("accepted", None, True, True)
    assert 0 < qwen["gap"] < 1e-4
    assert 0 < qwen["gradient"] < 1e-3
    assert bloom["verdict"] == "refused"
    assert "BloomForCausalLM does not work" in bloom["why"]
    assert 'set [model] attention = "rows"' in bloom["why"]
    assert bloom["gap"] < 1e-4, "measured with rows"
    assert qwen["replay_gap"] is qwen["packed_gap"] is None, "neither a mixture nor a hybrid"
    assert 0 < found["lfm2"]["packed_gap"] < 1e-4
    assert 0 < found["qwen3_moe"]["replay_gap"] < 1e-4
    assert 0 < found["qwen3_moe"]["expert_ranks_gap"] < 1e-4
    assert qwen["expert_ranks_gap"] is None


def test_wrong_gradients_and_adapters_that_peft_loses_are_found() -> None:
    def lost(self: object, directory: Path, factors: dict[str, object]) -> None:
        save(self, directory, {name: factor for name, factor in factors.items() if "down_proj" not in name})

    from trainer.model.lora import Adapters

    save = Adapters.save
    with mock.patch.object(Adapters, "save", lost):
        assert measure.measure(FAMILIES["qwen3"]).adapter is False
    with mock.patch.object(
        measure,
        "lay_out",
        lambda rows, share_prefixes: measure_lay_out(rows[::-1], share_prefixes=share_prefixes),
    ):
        assert (measure.measure(FAMILIES["qwen3"]).gap or 0) > 0.1


measure_lay_out = measure.lay_out


def test_experts_of_other_tokens_are_found() -> None:
    def shifted(rows: Sequence[Row], share_prefixes: bool) -> MicroBatch:
        moved = [
            replace(row, routes=None if row.routes is None else np.roll(row.routes, 1, 0)) for row in rows
        ]
        return measure_lay_out(moved, share_prefixes=share_prefixes)

    with mock.patch.object(replay, "lay_out", shifted):
        assert (measure.measure(FAMILIES["qwen3_moe"]).replay_gap or 0) > 0.1


def test_a_config_that_transformers_does_not_build_is_a_finding() -> None:
    found = measure.measure(Family("qwen3", {"hidden_size": "wide"}))
    assert found.verdict == found.rows == "refused"
    assert found.why is not None
    assert found.why.startswith("transformers does not build it")
    assert found.gap is found.gradient is found.export is found.adapter is None


def test_the_page_counts_and_explains_in_groups() -> None:
    differ = 'AForCausalLM does not work with the head: logits differ by {} nats; set [model] attention = "rows": x'
    found = {
        "a": Found("accepted", None, "accepted", 3e-6, 2e-5, True, False),
        "b": Found("refused", differ.format(1.2), "accepted", 0.0, 1e-7, True, True),
        "c": Found("refused", "no such class"),
        "d": Found("accepted", None, "accepted", 4e-6, 3e-5, True, False),
        "e": Found("refused", differ.format(3.4), "accepted", 0.0, 2e-7, True, True),
    }
    text = page(found, {"transformers": "5.0"})
    assert "Measured with transformers 5.0" in text
    assert "2 of 5 families are trained with spans, and 2 more with rows." in text
    assert "| a, d | yes | yes | < 1e-5 | < 1e-4 | yes | no |  |  |" in text
    assert "| b, e | no | yes | 0 | < 1e-6 | yes | yes |  |  |" in text
    assert "| c | no | no |  |  |  |  |  |  |" in text
    assert "- **b, e**: logits differ\n" in text


def test_unknown_names_and_a_page_of_a_part_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="families nosuch: there are llama, "):
        families.families(["nosuch"], None, print)
    with pytest.raises(ConfigError, match="--out is for all families"):
        families.families(["qwen3"], tmp_path / "page.md", print)
