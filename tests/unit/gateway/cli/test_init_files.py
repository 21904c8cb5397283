"""The file of `gateway init` for each kind of machine: both programs accept it, and engine and trainer do not share a part."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.init.machine import Machine, machine_of
from gateway.cli.init.project import Environment, OwnAgent, Project, run_toml
from gateway.config.settings import Settings
from trainer.config.settings import Settings as TrainerSettings

H100 = "NVIDIA H100 80GB HBM3, 81559\n"


@pytest.mark.parametrize(
    ("listed", "visible", "machine"),
    [
        ("", None, Machine()),
        (H100, None, Machine(1, "NVIDIA H100 80GB HBM3", 81559 / 1024)),
        (H100 * 8, "0,1", Machine(2, "NVIDIA H100 80GB HBM3", 81559 / 1024)),
        (H100, "", Machine()),
        ("NVIDIA GB10, [N/A]\n", None, Machine(1, "NVIDIA GB10", 0.0)),
    ],
)
def test_the_driver_lists_the_gpus(listed: str, visible: str | None, machine: Machine) -> None:
    assert machine_of(listed, visible) == machine


SHARED = ("--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "12G")
"""Of 80 GiB, with 15 GiB of weights, and 4.5 for what else the engine needs."""


@pytest.mark.parametrize(
    ("gpus", "engine"),
    [
        (0, {"args": ("--enforce-eager", "--dtype", "float32"), "tensor_parallel": 1}),
        (1, {"args": SHARED, "tensor_parallel": 1}),
        (2, {"env": {"CUDA_VISIBLE_DEVICES": "1"}, "tensor_parallel": 1}),
        (8, {"env": {"CUDA_VISIBLE_DEVICES": "1,2,3,4"}, "tensor_parallel": 4}),
    ],
)
def test_each_machine_has_its_parts(gpus: int, engine: dict[str, object], tmp_path: Path) -> None:
    machine = Machine(gpus, "NVIDIA H100", 80.0) if gpus else Machine()
    vllm = {"launch": "vllm", "python": "python"}
    tasks, held_out = Path("tasks.jsonl"), Path("held-out.jsonl")
    agent = OwnAgent("python a.py", "agent", tasks, held_out)
    project = Project("m", Path("models/m"), "qwen3", 2048, agent, vllm, machine, weights_gib=15.0)
    file = tmp_path / "run.toml"
    file.write_text(run_toml(project))
    gateway, trainer = Settings.load(file), TrainerSettings.load(file)
    assert {name: getattr(gateway.engine, name) for name in engine} == engine
    assert trainer.model.dtype == ("bfloat16" if gpus else "float32")
    assert (trainer.gateway.config, trainer.eval.every) == (file, 10)
    assert gateway.engine.max_lora_rank == (trainer.model.lora and trainer.model.lora.rank)


def test_the_arguments_of_an_environment_are_read_as_they_were_given(tmp_path: Path) -> None:
    args = {
        "size": 20,
        "ratio": 0.5,
        "system": 'a "quoted" word\n',
        "nested": {"with space": [1, True]},
        "none": [],
    }
    environment = Environment("fake:a", args, Path("/other/python"))
    file = tmp_path / "run.toml"
    file.write_text(
        run_toml(
            Project("m", Path("models/m"), "qwen3", 2048, environment, {"launch": "vllm", "python": "p"})
        )
    )
    trainer = TrainerSettings.load(file)
    assert trainer.rollout is not None
    assert (trainer.rollout.env, trainer.rollout.env_args) == ("fake:a", args)
    assert (trainer.rollout.env_python, trainer.eval.every) == (Path("/other/python"), 10)
