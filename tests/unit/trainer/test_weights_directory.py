"""The directories of versions: which files come with the weights, and what killed processes leave behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from headgate.weights import delta
from trainer.model import pretrained as model
from trainer.publish.filesystem import WeightsDirectory

WANTED = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "qwen.tiktoken",
        "tekken.json",
    ),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("tokenization_qwen.py", "configuration_qwen.py"),
]
"""Files that models on the Hugging Face hub have next to their weights, and without which engines do not come up."""
UNWANTED = [
    *("model.safetensors.index.json", "pytorch_model.bin", "model.pt"),
    *(
        "consolidated.00.pth",
        "tf_model.h5",
        "flax_model.msgpack",
        "rust_model.ot",
        "model.onnx",
        "model.onnx_data",
    ),
    *("model-q4_k_m.gguf", "model.ckpt.index", "training_args.bin", "optimizer.pt", "adapter.npz"),
    *("README.md", "LICENSE", "trainer_state.json", "manifest.json", "warmstart.json"),
]


def test_a_version_has_the_files_that_engines_need_and_no_weights_in_other_forms(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    for name in {*WANTED, *UNWANTED} - {file.name for file in base.iterdir()}:
        (base / name).write_text(name)
    shutil.copyfile(tiny_model / "model.safetensors", base / "model-00001-of-00001.safetensors")
    (base / "onnx").mkdir()
    (base / "onnx" / "tokenizer.json").write_text("{}")
    version = WeightsDirectory(tmp_path / "weights", base).write(1, 0, model.load(tiny_model), None)
    found = {file.name for file in version.iterdir()}
    assert found == {*WANTED, "config.json", "model.safetensors", "manifest.json"}
    assert all((version / name).read_bytes() == (base / name).read_bytes() for name in WANTED)
    assert json.loads((version / "manifest.json").read_text())["version"] == 1


def test_a_version_has_a_delta_unless_it_would_be_of_little_use(tiny_model: Path, tmp_path: Path) -> None:
    policy = model.load(tiny_model)
    weights = WeightsDirectory(tmp_path / "weights", tiny_model, deltas=True)
    first = weights.write(1, 0, policy, None)
    assert not (first / "delta.npz").exists(), "its parent is not here"
    with torch.no_grad():
        policy.lm_head.weight[0, 0] += 1
    second = weights.write(2, 1, policy, None)
    assert json.loads((second / "manifest.json").read_text())["files"].keys() >= {"delta.npz"}
    copy = shutil.copytree(first, tmp_path / "copy")
    delta.apply(second / "delta.npz", copy)
    assert (copy / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_()
    assert not (weights.write(3, 2, policy, None) / "delta.npz").exists(), "everything changed"


def test_the_config_names_the_precision_of_the_weights_that_are_written(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Engines choose theirs by it."""
    policy = model.load(tiny_model)
    state = {name: tensor.bfloat16() for name, tensor in policy.state_dict().items()}
    version = WeightsDirectory(tmp_path / "weights", tiny_model).write(1, 0, policy, None, state)
    assert json.loads((version / "config.json").read_text())["dtype"] == "bfloat16"
    stored = load_file(version / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
