"""recipes/: every file is one that its program takes, they agree with one another, and the models' real shapes fit their GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.config.settings import Settings as GatewaySettings
from scheduler.cluster.file import ClusterFile, check_trainer
from scheduler.cluster.gateway_file import GatewayFile
from scheduler.cluster.sharing import IDLE_GB, Need, engine_args, fit
from trainer.cli import app
from trainer.commands.plan_memory import plan
from trainer.config.settings import Settings
from trainer.memory_plan import GIB

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
PUBLISHED = {
    "qwen3-0.6b": ("Qwen3-0.6B", 596_049_920),
    "qwen3-8b": ("Qwen3-8B", 8_190_735_360),
    "qwen3-8b-lora": ("Qwen3-8B", 8_190_735_360),
    "qwen3-8b-in-turn": ("Qwen3-8B", 8_190_735_360),
    "qwen3-32b": ("Qwen3-32B", 32_762_123_264),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", 30_532_122_624),
}
"""The model of each recipe, and its number of weights as its stored tensors have them."""
GPU = 80.0
"""GiB."""


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_recipe_is_checked_here() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/trainer.toml")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_files_of_a_recipe_agree(name: str) -> None:
    folder = Path("recipes") / name
    trainer, gateway = Settings.load(folder / "trainer.toml"), GatewaySettings.load(folder / "gateway.toml")
    assert trainer.model.path == gateway.model.path == Path("models") / PUBLISHED[name][0]
    assert gateway.model.max_model_len is not None and gateway.model.max_model_len <= trainer.batch.tokens
    readme = (folder / "README.md").read_text()
    assert "Nothing here has run on a GPU" in readme and f"Qwen/{PUBLISHED[name][0]}" in readme
    if not (folder / "cluster.toml").exists():
        assert trainer.gateway.config == folder / "gateway.toml"
        return
    file = ClusterFile.load(folder / "cluster.toml")
    assert file.trainer is not None and file.trainer.config is not None
    check_trainer(file.trainer.config)
    assert (file.gateway.config, file.trainer.config) == (folder / "gateway.toml", folder / "trainer.toml")
    assert trainer.gateway.url is not None
    assert trainer.gateway.url.endswith(
        GatewayFile.read(file.gateway.config, None, {"HEADGATE_ADMIN_KEY": "key"}).url[-5:]
    )
    assert trainer.parallel.shard == file.trainer.ranks
    assert file.trainer.gpus == 1 and file.engine.gpus == gateway.engine.tensor_parallel


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "qwen3-0.6b")) for name in PUBLISHED],
)
def test_the_real_shapes_fit_the_gpus(name: str) -> None:
    """The dry run on the meta device: a forward and a backward pass of the whole architecture, and the memory for it.

    Where engine and trainer have the GPU in turn, each has all of it but for what the other keeps.
    """
    model, weights = PUBLISHED[name]
    in_turn = bool(Settings.load(RECIPES / name / "trainer.toml").gateway.nodes)
    args = GatewaySettings.load(RECIPES / name / "gateway.toml").engine.args
    engine = (
        float(args[args.index("--gpu-memory-utilization") + 1]) if "--gpu-memory-utilization" in args else 0.0
    )
    memory = f"{GPU - IDLE_GB if in_turn else GPU * (1 - engine):.0f}GiB"
    found = CliRunner().invoke(app, [
        "run", f"recipes/{name}/trainer.toml", "--dry-run", "--meta", "--memory", memory,
        "--set", f"model.path=recipes/shapes/{model}",
        # No request is sent: the address of a recipe may be in use.
        *(("--set", "gateway.url=http://127.0.0.1:1") if (RECIPES / name / "cluster.toml").exists() else ()),
    ])  # fmt: skip
    assert found.exit_code == 0, found.output
    planned: dict[str, Any] = json.loads(found.output.splitlines()[-1])["memory"]
    assert planned["fits"] and planned["changes"] == []
    trained = Settings.load(RECIPES / name / "trainer.toml")
    assert planned["weights"] == weights + _adapters(trained)
    if engine:
        shared = fit(GPU, Need(engine * GPU), Need(planned["needed"] / 2**30))
        assert shared.kind == ("in turn" if in_turn else "together"), shared.why
        # The size of the cache is the plan's: measured at a start, it would depend on what the trainer has then.
        assert args == engine_args(engine, GPU, weights * 2 / GIB)
    # The pages have what is predicted.
    for page in (RECIPES / name / "README.md", RECIPES / "README.md"):
        assert f"{planned['needed'] / 2**30:.0f} GiB" in page.read_text()


def _adapters(settings: Settings) -> int:
    """Count the adapters' parameters of Qwen3-8B's linear layers: rank times the sum of both sides, for each."""
    if settings.model.lora is None:
        return 0
    width, inner, queries, keys = 4096, 12_288, 32 * 128, 8 * 128
    sides = [(width, queries), (width, keys), (width, keys), (queries, width), *[(width, inner)] * 3]
    return 36 * settings.model.lora.rank * sum(a + b for a, b in sides)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "model", "ranks"),
    [
        ("kuberay/trainer.toml", "Qwen3-8B", 1),
        ("kubernetes/trainer.toml", "Qwen3-8B", 4),
        ("trainer.toml", "Qwen3-0.6B", 1),
        ("one-gpu/trainer.toml", "Qwen3-0.6B", 1),
    ],
)
def test_what_deploy_trains_fits_its_gpus(
    file: str, model: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that the folder downloads; compose.yaml, which takes any, with the smallest recipe's."""
    monkeypatch.setenv("HEADGATE_ADMIN_KEY", "an admin key")
    settings = Settings.load(ROOT / "deploy" / file, [f"model.path={RECIPES / 'shapes' / model}"])
    assert settings.model.dtype == "bfloat16"
    assert ranks in (1, settings.parallel.shard)
    found = plan(settings, ranks, 80 * GIB, 0)
    assert found.fits, found
