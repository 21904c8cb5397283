"""Loading shard by shard against transformers' own `from_pretrained`: weights, buffers and ties, on one rank and on several."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.ranks import on_new_ranks, on_ranks
from trainer.config.parallel import ParallelSettings
from trainer.errors import ConfigError
from trainer.model import loading, parallel, start_check
from trainer.model.policy import Policy

SIZES = {
    "vocab_size": 130, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LONG_ROPE},
    "qwen3": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gemma2": {"sliding_window": 5},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 1},
}
"""Scaled rotary angles, tied embeddings, causal masks as buffers, an embedding's factor, sinks, and experts stored one by one."""
SHARDED = ("qwen3", "gpt2", "mixtral")
"""Those that `make test` loads by several ranks: what else is special is the same on each rank."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of every kind, norms and biases too, in several files."""
    directory = tmp_path_factory.mktemp("checkpoints") / request.param
    torch.manual_seed(3)
    config = AutoConfig.for_model(request.param, **{**SIZES, **ARCHITECTURES[request.param]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, max_shard_size="20KB")
    assert len([*directory.glob("*.safetensors")]) > 1
    return directory


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Every weight and every buffer, those that are never saved too."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].device) == (value.dtype, value.device), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_what_transformers_would_load(checkpoint: Path, dtype: torch.dtype) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    model = loading.empty(checkpoint, dtype)
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    loading.fill(model, checkpoint, "cpu")
    assert_same(state_of(model), state_of(expected))
    ties = [len({id(tensor) for tensor in state_of(each).values()}) for each in (model, expected)]
    assert ties[0] == ties[1] and not model.training
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def spread(checkpoint: Path, replicate: int) -> tuple[dict[str, Tensor], set[str], int]:
    """The gathered tensors, the names of those that are not shards, and how many numbers a rank holds."""
    ranks = parallel.join(ParallelSettings(replicate=replicate), "cpu")
    policy = Policy(loading.empty(checkpoint, torch.float32))
    ranks.shard(policy, policy.layers, passes=("plain",))
    loading.fill(policy.model, checkpoint, "cpu", ranks)
    state = state_of(policy.model)
    held = sum(p.to_local().numel() for p in policy.model.parameters())  # type: ignore[attr-defined]
    whole = {name: parallel.whole(tensor.detach()) for name, tensor in state.items()}
    start_check.check(policy)
    gathered = parallel.gather(policy.published(), ranks)
    assert all(torch.equal(value, whole[name]) for name, value in gathered.items())
    return whole, {name for name, tensor in state.items() if not isinstance(tensor, parallel.DTensor)}, held


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in SHARDED)) for name in ARCHITECTURES],
    indirect=True,
)
@pytest.mark.parametrize(
    ("ranks", "replicate"), [(3, 1), *(pytest.param(2, n, marks=pytest.mark.long) for n in (1, 2))]
)
def test_several_ranks_have_together_what_one_has(checkpoint: Path, ranks: int, replicate: int) -> None:
    """Three ranks, of which some have no part of a tensor with four rows, and two that hold a copy each."""
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = on_ranks(ranks, spread, checkpoint, replicate)
    buffers = dict(expected.named_buffers())
    for whole, plain, _ in found:
        assert_same(whole, state_of(expected))
        assert plain == buffers.keys(), "every weight is a shard"
    assert sum(held for *_, held in found) == replicate * sum(p.numel() for p in expected.parameters())


WIDTH, INNER, LAYERS = 1024, 4096, 5
WHOLE = 4 * LAYERS * 3 * WIDTH * INNER


def big(directory: Path) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **{**SIZES, **sizes}), dtype=torch.bfloat16
    )
    model.save_pretrained(directory)


def within(directory: Path, way: str) -> str:
    """Loads with three quarters of the model's size to allocate; returns the outcome.

    The kernel counts what the process has, and the mapped file, which takes no memory of its own.
    """
    ranks = parallel.join(ParallelSettings(), "cpu")
    policy = Policy(loading.empty(directory, torch.float32))
    ranks.shard(policy, policy.layers)
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    limit = now + (directory / "model.safetensors").stat().st_size + WHOLE * 3 // 4
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        if way == "whole":
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        else:
            loading.fill(policy.model, directory, "cpu", ranks)
    except (RuntimeError, MemoryError) as error:
        return f"failed: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "loaded"


def test_no_rank_needs_memory_for_the_whole_model(tmp_path: Path) -> None:
    big(tmp_path)
    assert on_new_ranks(2, within, tmp_path, "shards") == ["loaded", "loaded"]
    assert all("alloc" in message for message in on_new_ranks(2, within, tmp_path, "whole")), (
        "it is too little for all"
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config = AutoConfig.for_model("llama", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


NORM, HEAD, QUERY = "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj"
WRONG = {
    "missing": ({NORM: None}, f"{NORM} is missing"),
    "misshapen": (
        {HEAD: torch.ones(131, 32)},
        rf"{HEAD} has shape \[131, 32\], and the model wants \[130, 32\]",
    ),
    "unexpected": ({f"{QUERY}.bias": torch.ones(32)}, f"{QUERY}.bias has no place in the model"),
    "many": ({f"{QUERY}.x{i}": torch.ones(1) for i in range(7)}, "x4 has no place in the model and 2 more"),
}


def change(directory: Path, tensors: dict[str, Tensor | None]) -> None:
    file = directory / "model.safetensors"
    found = load_file(file) | tensors
    save_file({name: t for name, t in found.items() if t is not None}, file, {"format": "pt"})


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_refused_by_name(small: Path, case: str) -> None:
    change(small, WRONG[case][0])
    with pytest.raises(ConfigError, match=rf"\[model\] path.*config.json: .*{WRONG[case][1]}"):
        loading.fill(loading.empty(small, torch.float32), small, "cpu")


def refusal(directory: Path) -> str:
    ranks = parallel.join(ParallelSettings(), "cpu")
    policy = Policy(loading.empty(directory, torch.float32))
    ranks.shard(policy, policy.layers)
    with pytest.raises(ConfigError) as refused:
        loading.fill(policy.model, directory, "cpu", ranks)
    return str(refused.value)


def test_what_one_rank_sees_every_rank_refuses(small: Path) -> None:
    """The first of two ranks misses none of 129 rows in place of 130."""
    change(small, {HEAD: torch.ones(129, 32)})
    message = on_ranks(2, refusal, small)
    assert message[0] == message[1]
    assert f"{HEAD} has shape [129, 32], and the model wants [130, 32]" in message[0]


def test_tied_weights_that_were_stored_apart_are_refused(small: Path) -> None:
    config = small / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    with pytest.raises(ConfigError, match=f"{HEAD} is tied to another, but stored with other values"):
        loading.fill(loading.empty(small, torch.float32), small, "cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d.rename(d.parent / "elsewhere"), "the folder does not exist"),
        (lambda d: (d / "config.json").unlink(), "it has no config.json"),
        (
            lambda d: (d / "model.safetensors").unlink(),
            "model.safetensors does not exist; its weights are needed",
        ),
        (lambda d: (d / "model.safetensors").write_bytes(b"\1" * 64), "the checkpoint cannot be used"),
        (
            lambda d: (d / "config.json").write_text(
                (d / "config.json")
                .read_text()
                .replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1)
            ),
            r"its weights are quantized \(fp8\); write them in bfloat16 first",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(small: Path, damage: Any, message: str) -> None:
    damage(small)
    with pytest.raises(ConfigError, match=rf"\[model\] path.*{message}"):
        loading.fill(loading.empty(small, torch.float32), small, "cpu")
