"""Training on images: the trainer's passes are those of transformers' own model and processor on the same images.

Models are tiny and random, one of each kind of the Qwen-VL family.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from gateway.render.images import MODELS as GIVEN
from tests.harness.ranks import on_ranks
from tests.harness.vision_model import PAD, save_processor, save_vision_model, vision_config
from tests.unit.trainer.rank_trainers import Curve, assert_close, in_precision
from tests.unit.trainer.vision_episodes import (
    BLUE,
    GREEN,
    RED,
    groups_with_images,
    keep,
    name_of,
    own_logprobs,
    plain,
    rows,
    settings_of,
    two_turns,
)
from trainer.commands.dry_run import rehearse
from trainer.config.settings import Settings
from trainer.data.details import DetailChoice
from trainer.data.packing import lay_out
from trainer.errors import ConfigError
from trainer.model import loading, pretrained, tensor_parallel, vision
from trainer.publish.filesystem import WeightsDirectory
from trainer.rank_rpc import serve_commands, shutdown_ranks
from trainer.rank_trainer import RankTrainer
from trainer.report.tokens import token_table

FILES = {name_of(data): data for data in (RED, GREEN, BLUE)}
STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "model"
    save_vision_model(directory, seed=3)
    return directory


def save_kind(directory: Path, kind: str) -> None:
    """A tiny model of another kind of the family."""
    from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig

    save_processor(directory)
    given = vision_config().to_dict()
    text, tower = given["text_config"], given["vision_config"]
    ids = {key: value for key, value in given.items() if key.endswith("token_id")}
    for part in (text, tower):
        part.pop("model_type")
    if kind == "qwen2_5_vl":
        tower = {
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
        }  # fmt: skip
        config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    else:
        tower = {
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64,
            "patch_size": 14, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
        }  # fmt: skip
        text["head_dim"] = 32
        config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    torch.manual_seed(4)
    made = AutoModelForImageTextToText.from_config(config).float()
    with torch.no_grad():
        made.lm_head.weight.mul_(3)
    made.save_pretrained(directory)


def logprobs_of(trainer: RankTrainer, episode: Any) -> Tensor:
    return trainer.policy.logprobs(lay_out(rows(episode, trainer), share_prefixes=False))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_log_probabilities_are_those_of_the_models_own_forward_pass(
    model: Path, tmp_path: Path, kind: str
) -> None:
    path = model
    if kind != "qwen2_vl":
        save_kind(path := tmp_path / "model", kind)
    trainer = RankTrainer.open(settings_of(path, tmp_path / "run"))
    keep(trainer)
    episode = two_turns("a")
    (row,) = rows(episode, trainer)
    assert len(row.images) == 2
    with torch.no_grad():
        theirs = own_logprobs(plain(path), path, row, FILES)
    ours = logprobs_of(trainer, episode)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    other = logprobs_of(trainer, two_turns("a", images=(GREEN, BLUE)))
    assert (other - ours).abs().min() > 1e-4


@pytest.mark.parametrize("how", ["frozen", "trained"])
def test_gradients_are_those_of_the_models_own_forward_pass(model: Path, tmp_path: Path, how: str) -> None:
    trainer = RankTrainer.open(settings_of(model, tmp_path, vision=how))
    keep(trainer)
    episode = two_turns("a")
    (row,) = rows(episode, trainer)
    theirs = plain(model)
    own_logprobs(theirs, model, row, FILES).sum().backward()
    micro = lay_out([row], share_prefixes=False)
    with trainer.policy.at_work(micro):
        trainer.policy(micro)[0].sum().backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    seen = 0
    for name, weight in trainer.model.named_parameters():
        if ".visual." in name and how == "frozen":
            assert weight.grad is None, name
            continue
        assert expected[name] is not None
        seen += ".visual." in name
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-5)
    assert bool(seen) == (how == "trained")


def learn(settings: Settings, until: int) -> tuple[Curve, dict[str, Tensor]] | None:
    """Trains from the newest checkpoint to a version, in float64; a rank finds the images in the run's folder."""
    with in_precision(torch.float64):
        trainer = RankTrainer.open(settings)
        if not trainer.ranks.is_rank_zero:
            serve_commands(trainer)
            return None
        keep(trainer)
        curve = []
        while trainer.version < until:
            curve.append(trainer.train(groups_with_images(trainer.version)))
        trainer.save_checkpoint()
        weights = trainer.gather_weights()
        shutdown_ranks(trainer)
        return curve, weights


@pytest.mark.parametrize("how", ["trained", pytest.param("frozen", marks=pytest.mark.long)])
def test_two_ranks_learn_what_one_learns_and_one_goes_on_with_the_same_images(
    model: Path, tmp_path: Path, how: str
) -> None:
    (alone,) = on_ranks(1, learn, settings_of(model, tmp_path / "1", vision=how), 2 * STEPS)
    settings = settings_of(model, tmp_path / "2", vision=how)
    (found, _), _ = on_ranks(2, learn, settings, STEPS)
    ((resumed, weights),) = on_ranks(1, learn, settings, 2 * STEPS)
    assert_close([*found, *resumed], alone[0], 1e-6)
    for name, value in alone[1].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
    start = plain(model, torch.float64).state_dict()
    moved = {name for name, value in weights.items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if how == "trained" or ".visual." not in name}
    assert found[0]["trained_tokens"] == 3 * 16 + 5 + 6 + 7


def first_step(settings: Settings) -> float | None:
    """The gap to the recorded log-probabilities, as a figure of a pass, and the norm of its gradient."""
    trainer = RankTrainer.open(settings)
    if not trainer.ranks.is_rank_zero:
        serve_commands(trainer)
        return None
    keep(trainer)
    measured = trainer.train(groups_with_images(0))
    shutdown_ranks(trainer)
    return measured["loss"] + measured["grad_norm"] + measured["logprob_gap_mean"]


@pytest.mark.parametrize(
    "more",
    [
        {"vision": "trained"},
        *(pytest.param(more, marks=pytest.mark.long) for more in ({}, {"lora": {"rank": 3}})),
    ],
    ids=str,
)
def test_passes_in_bfloat16_are_those_in_float32_but_for_rounding(
    model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    (exact,) = on_ranks(1, first_step, settings_of(model, tmp_path / "1", **more))
    given = settings_of(model, tmp_path / "2", dtype="bfloat16", activation_checkpointing=1, **more)
    found, _ = on_ranks(2, first_step, given)
    assert found == pytest.approx(exact, rel=0.03)


def test_adapters_are_of_the_language_model_alone_and_their_sum_has_the_checkpoints_names(
    model: Path, tmp_path: Path
) -> None:
    trainer = RankTrainer.open(settings_of(model, tmp_path, lora={"rank": 3}))
    keep(trainer)
    before = logprobs_of(trainer, two_turns("a"))
    trainer.train(groups_with_images(0))
    factors = [name for name, weight in trainer.model.named_parameters() if weight.requires_grad]
    assert len(factors) == 2 * 2 * 7, "two factors for each of seven matrices of two layers"
    assert not [name for name in factors if ".visual." in name]
    with trainer.policy.computing("merged"):
        now = logprobs_of(trainer, two_turns("a"))
    assert (now - before).abs().max() > 1e-3
    written = WeightsDirectory(tmp_path / "weights", model).write(
        1, 0, trainer.model, None, trainer.gather_weights()
    )
    (row,) = rows(two_turns("a"), trainer)
    with torch.no_grad():
        theirs = own_logprobs(plain(written), written, row, FILES)
    torch.testing.assert_close(now, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["frozen", "trained"])
def test_a_version_has_the_names_of_the_checkpoint_and_is_known_again(
    model: Path, tmp_path: Path, how: str
) -> None:
    trainer = RankTrainer.open(settings_of(model, tmp_path, vision=how))
    keep(trainer)
    trainer.train(groups_with_images(0))
    state = trainer.gather_weights()
    written = WeightsDirectory(tmp_path / "weights", model).write(1, 0, trainer.model, trainer.probe, state)
    assert names_in(written) == names_in(model)
    assert {file.name for file in model.iterdir()} <= {file.name for file in written.iterdir()}
    assert pretrained.holds(written, pretrained.as_stored(trainer.model, state))
    trainer.train(groups_with_images(1))
    assert not pretrained.holds(written, pretrained.as_stored(trainer.model, trainer.gather_weights()))
    assert trainer.probe is not None
    probed = {token for sequence in trainer.probe.sequences for token in sequence}
    assert probed.isdisjoint({PAD}), "engines are probed with words alone"


def names_in(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"attention": "spans"}, r'accepts images.*set \[model\] attention = "rows"'),
        ({"vision": "trained", "lora": {}}, "leaves the vision tower frozen"),
    ],
)
def test_what_no_model_that_sees_is_trained_with_is_refused(
    model: Path, tmp_path: Path, table: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        RankTrainer.open(settings_of(model, tmp_path, **table))


def test_reports_name_why_an_episode_with_an_image_is_not_trained(model: Path, tmp_path: Path) -> None:
    trainer = RankTrainer.open(settings_of(model, tmp_path))
    keep(trainer)
    batch = trainer.begin_batch(DetailChoice(tokens=True))
    trainer.exclude_images(batch, {name_of(GREEN)})
    trainer.add_groups(batch, groups_with_images(0)[:2])
    trainer.step(batch)
    table = token_table(batch.details).to_pydict()
    found = Counter(zip(table["group_id"], table["mask_reason"], strict=True))
    assert found == {("g0-0", "image_missing"): 16, ("g0-0", None): 5, ("g0-1", None): 16 + 6}


def test_adapters_alone_are_not_published_of_a_model_that_sees(model: Path, tmp_path: Path) -> None:
    lora = {"publish": {"transport": "lora", "url": "http://127.0.0.1:1"}}
    with pytest.raises(ConfigError, match="adapters of a vision model cannot be published"):
        RankTrainer.open(settings_of(model, tmp_path, more=lora, lora={"rank": 2}))


def test_matrices_of_a_model_that_sees_are_not_divided(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[parallel\] tensor = 2: .*takes images"):
        tensor_parallel.plan_of(loading.empty(model, torch.float32), 2)


def test_trainer_and_gateway_know_the_same_models() -> None:
    assert vision.MODELS == GIVEN


def test_a_dry_run_of_a_model_that_sees_is_one_of_its_words(model: Path, tmp_path: Path) -> None:
    found = rehearse(settings_of(model, tmp_path), memory=2**40)
    assert found.computed is not None
    assert found.computed.grad_norm > 0
    assert found.memory is not None
    tower = sum(weight.numel() for weight in plain(model).model.visual.parameters())
    assert found.memory.prediction.device["gradients"] == 4 * (found.memory.weights - tower)
