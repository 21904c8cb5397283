"""Weights that are wrong, on real vLLM: those that are refused reach no engine, and those that only an engine can detect leave it
with the version before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.updates.weights_check import read_weights
from tests.harness.gateways import RunningGateway, run_gateway, settings_for
from tests.harness.models import probe_of, save_model
from tests.harness.vllm import SharedEngine
from tests.harness.weights import publish, write_manifest

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

Tensors = dict[str, torch.Tensor]
NORM, EMBEDDING, UP = "model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"


def with_nan(tensors: Tensors, name: str, row: int) -> None:
    tensors[name][row, 0] = float("nan")


CHANGES: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "extra": (lambda t: t.update({"model.extra.weight": torch.ones(4)}), "model.extra.weight"),
    "shape": (lambda t: t.update({UP: torch.ones(255, 128)}), UP),
    "missing": (lambda t: t.pop(UP), UP),
    "unused row": (lambda t: with_nan(t, EMBEDDING, 271), EMBEDDING),
    "layer": (lambda t: with_nan(t, UP, 3), UP),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two that have nothing in common."""
    root = tmp_path_factory.mktemp("models")
    found = [root / "a", root / "b"]
    for seed, path in enumerate(found):
        save_model(path, seed)
    return found


@pytest.fixture(scope="module")
async def gateway(
    vllm: SharedEngine, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningGateway]:
    values = settings_for(models[0], tmp_path_factory.mktemp("work"), engine=vllm.settings)
    async with run_gateway(values, in_process=False) as running:
        yield running


async def next_number(gateway: RunningGateway) -> int:
    """A number that the gateway takes, whichever tests came before."""
    known = (await gateway.http.get("/admin/v1/versions")).json()["versions"]
    return 1 + max(row["version"] for row in known)


def version(tmp_path: Path, models: list[Path], number: int, change: str = "") -> Path:
    """The second model as a version of the first, maybe with something wrong."""
    folder = publish(models[1], tmp_path / f"v{number}", number, 0)
    if change:
        tensors = load_file(folder / "model.safetensors")
        CHANGES[change][0](tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_manifest(folder, number, 0, probe_of(models[1], models[0]))
    return folder


async def test_what_does_not_fit_the_first_version_is_refused_and_no_engine_hears_of_it(
    gateway: RunningGateway, models: list[Path], tmp_path: Path
) -> None:
    before = (await gateway.admin.status())["engines"]
    first = await next_number(gateway)
    for number, (change, (_, tensor)) in enumerate(CHANGES.items(), first):
        path = version(tmp_path, models, number, change)
        response = await gateway.http.post("/admin/v1/weights", json={"version": number, "path": str(path)})
        assert response.status_code == 422, change
        assert tensor in response.json()["error"]["message"]
    assert (await gateway.admin.status())["engines"] == before


@pytest.mark.parametrize(
    ("change", "reason"), [("extra", "There is no module or parameter named 'extra'"), ("layer", UP)]
)
async def test_a_version_that_only_the_engine_refuses_leaves_it_with_the_one_before(
    gateway: RunningGateway,
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    reason: str,
) -> None:
    """Weights that only the engine can reject leave it with the version before: the gateway's check of the tensors is off."""
    monkeypatch.setattr(
        "gateway.control.versions.read_weights", lambda path, v, _base, _rank: read_weights(path, v)
    )
    number = await next_number(gateway)
    path = version(tmp_path, models, number, change)
    record = await gateway.admin.publish(number, str(path), wait_s=600)
    print(record["why"])
    assert (record["state"], record["bad"]) == ("failed", True)
    assert reason in record["why"]
    assert "Traceback" not in record["why"] and "\n" not in record["why"]
    (engine,) = (await gateway.admin.status())["engines"]
    assert (engine["state"], engine["version"]) == ("open", 0)
    assert (await gateway.http.get("/readyz")).status_code == 200
    _, headers = await gateway.open("goes on", mode="eval")
    assert (await gateway.chat(headers, max_tokens=8)).status_code == 200
