"""Where tensors of a checkpoint lie in a worker's memory, and whether every bit of them does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headgate.weights.plugin.headgate_transfer.proof import Block, Places, QuantizedBlock, compare_adapter

HEADS, WIDTH, INNER, VOCABULARY = 8, 16, 24, 40
Checkpoint = dict[str, Tensor]


def checkpoint(seed: int, *, near: Checkpoint | None = None) -> Checkpoint:
    """Return a version of a small model in bf16; `near`: another version, from which one number of each matrix differs."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    found = {"model.embed_tokens.weight": drawn(VOCABULARY, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for i in range(2):
        layer = f"model.layers.{i}"
        found |= {f"{layer}.self_attn.{n}_proj.weight": drawn(HEADS, WIDTH) for n in "qkv"}
        found |= {f"{layer}.self_attn.{n}_proj.bias": torch.zeros(HEADS).bfloat16() for n in "qkv"}
        found |= {f"{layer}.mlp.{n}_proj.weight": drawn(INNER, WIDTH) for n in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = drawn(WIDTH, INNER)
        found[f"{layer}.input_layernorm.weight"] = torch.ones(WIDTH).bfloat16()
        found[f"{layer}.post_attention_layernorm.weight"] = torch.ones(WIDTH).bfloat16()
    if near is None:
        return found
    changed = {name: tensor.clone() for name, tensor in near.items()}
    for tensor in changed.values():
        if tensor.ndim == 2:
            tensor[seed % len(tensor), 0] += 1
    return changed


def loaded(version: Checkpoint, shard: int = 0, shards: int = 1) -> dict[str, Tensor]:
    """Return the memory of one worker: rows of merged matrices and columns of the others are split, and the head is a copy."""

    def rows(name: str) -> Tensor:
        return version[name].chunk(shards)[shard]

    embedding = torch.nn.functional.pad(version["model.embed_tokens.weight"], (0, 0, 0, 8)).chunk(shards)[
        shard
    ]
    memory = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    memory["model.norm.weight"] = version["model.norm.weight"].bfloat16()
    for i in range(2):
        layer = f"model.layers.{i}"
        for kind in ("weight", "bias"):
            parts = [rows(f"{layer}.self_attn.{n}_proj.{kind}") for n in "qkv"]
            memory[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [rows(f"{layer}.mlp.{n}_proj.weight") for n in ("gate", "up")]
        memory[f"{layer}.mlp.gate_up_proj.weight"] = torch.cat(parts)
        down = version[f"{layer}.mlp.down_proj.weight"].chunk(shards, 1)[shard]
        memory[f"{layer}.mlp.down_proj.weight"] = down.clone()
        for norm in ("input", "post_attention"):
            name = f"{layer}.{norm}_layernorm.weight"
            memory[name] = version[name].clone()
    return memory


def quantized(memory: dict[str, Tensor], scales: str) -> dict[str, Tensor | Block]:
    """Return a worker's memory with its layers' matrices in float8, with one scale for each row or for each matrix."""
    found: dict[str, Tensor | Block] = dict(memory)
    for name, rows in memory.items():
        if "proj.weight" in name and scales != "none":
            largest = (
                rows.abs().amax(1, keepdim=True) if scales == "rows" else rows.abs().amax().reshape(1, 1)
            )
            scale = largest.float() / 448
            found[name] = QuantizedBlock((rows / scale).to(torch.float8_e4m3fn), scale, torch.bfloat16)
    return found


@pytest.mark.parametrize("scales", ["none", "rows", "matrix"])
@pytest.mark.parametrize("shards", [1, 2])
def test_versions_that_were_loaded_are_held_and_their_parents_are_not(shards: int, scales: str) -> None:
    workers, version = [Places(shard, shards) for shard in range(shards)], checkpoint(0)
    for number in range(1, 4):
        for shard, places in enumerate(workers):
            result = places.compare(quantized(loaded(version, shard, shards), scales), version.items())
            assert (result.wrong, result.missing) == ({}, [])
        version, parent = checkpoint(number, near=version), version
        kept = [
            places.compare(quantized(loaded(parent, i, shards), scales), version.items())
            for i, places in enumerate(workers)
        ]
        changed = {name for name, tensor in version.items() if tensor.ndim == 2}
        assert {name for result in kept for name in result.wrong} == changed, "one number of each differs"


def flip(memory: dict[str, Tensor], name: str) -> None:
    memory[name].view(torch.int16)[1, 1] ^= 1


def swap(memory: dict[str, Tensor], one: str, other: str) -> None:
    memory[one], memory[other] = memory[other], memory[one]


def swap_inside(memory: dict[str, Tensor]) -> None:
    qkv = memory["model.layers.1.self_attn.qkv_proj.weight"]
    qkv.copy_(torch.cat([qkv[:HEADS], qkv[2 * HEADS :], qkv[HEADS : 2 * HEADS]]))


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "one bit": (lambda m: flip(m, "model.layers.0.mlp.down_proj.weight"), "model.layers.0.mlp.down_proj.weight"),
    "one bit of a part": (lambda m: flip(m, "model.layers.1.mlp.gate_up_proj.weight"), "model.layers.1.mlp.gate_proj.weight"),
    "layers": (
        lambda m: swap(m, "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        "model.layers.0.mlp.down_proj.weight",
    ),
    "keys and values": (swap_inside, "model.layers.1.self_attn.k_proj.weight"),
    "the head's copy": (lambda m: flip(m, "lm_head.weight"), "model.embed_tokens.weight"),
    "a norm": (lambda m: m["model.layers.0.input_layernorm.weight"].add_(1), "model.layers.0.input_layernorm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_memory_is_found_by_the_name_of_the_tensor(damage: str) -> None:
    places, first = Places(), checkpoint(0)
    assert not places.compare(loaded(first), first.items()).wrong
    version = checkpoint(1, near=first)
    memory = loaded(version)
    do, name = DAMAGE[damage]
    do(memory)
    result = places.compare(memory, version.items())
    assert name in result.wrong
    assert len(result.wrong) <= 2


def test_a_tensor_in_another_form_is_missing_and_not_wrong() -> None:
    version = checkpoint(0)
    memory = loaded(version)
    memory["model.layers.0.mlp.down_proj.weight"] = (
        memory["model.layers.0.mlp.down_proj.weight"].t().contiguous()
    )
    result = Places().compare(memory, version.items())
    assert (result.wrong, result.missing) == ({}, ["model.layers.0.mlp.down_proj.weight"])


def test_the_factors_of_an_adapter_are_compared_with_their_scaling() -> None:
    name = "model.layers.0.self_attn.q_proj"
    first, second = torch.randn(4, 16), torch.randn(16, 4)
    version = {
        f"base_model.model.{name}.lora_A.weight": first,
        f"base_model.model.{name}.lora_B.weight": second,
    }
    held = {f"{name}.lora_A.weight": first.bfloat16(), f"{name}.lora_B.weight": second.bfloat16() * 2}
    assert not compare_adapter(held, version, 2.0).wrong
    assert list(compare_adapter(held, version, 1.0).wrong) == [f"base_model.model.{name}.lora_B.weight"]
    assert len(compare_adapter({}, version, 2.0).wrong) == 2


def test_rows_that_repeat_are_at_one_place_alone() -> None:
    """Most rows of an embedding may be equal, and the engine pads it: shifted by some rows it would still resemble itself."""
    name = "model.embed_tokens.weight"

    def version(first: int) -> Checkpoint:
        rows = torch.zeros(VOCABULARY, WIDTH)
        rows[:, -1] = 1.0
        rows[first : first + 6] = torch.eye(WIDTH)[:6]
        return {name: rows}

    places = Places()
    for first in (4, 20, 0):
        held = torch.nn.functional.pad(version(first)[name], (0, 0, 0, 8))
        assert not places.compare({name: held}, version(first).items()).wrong
        held[30, 3] = 0.5
        assert name in places.compare({name: held}, version(first).items()).wrong


def test_a_tensor_whose_rows_are_all_equal_is_judged_by_the_next_version() -> None:
    name, places = "model.embed_tokens.weight", Places()
    for rows in (torch.zeros(VOCABULARY, WIDTH), torch.rand(VOCABULARY, WIDTH)):
        held = torch.nn.functional.pad(rows, (0, 0, 0, 8))
        assert not places.compare({name: held}, [(name, rows)]).wrong
    held[0, 0] += 1
    assert name in places.compare({name: held}, [(name, rows)]).wrong


def test_norms_that_have_hardly_learned_are_not_mistaken_for_one_another() -> None:
    """After one step each number of a norm is one of two."""
    signs = torch.tensor([1, 1, -1, 1, 1, -1, 1, 1])
    one, other = 1 + 1e-3 * signs, 1 + 1e-3 * signs.roll(1)
    names = [f"model.layers.0.self_attn.{n}_norm.weight" for n in "qk"]
    version = dict(zip(names, (one, other), strict=True))
    assert Places().compare(dict(version), version.items()).wrong == {}
    stale = version | {names[1]: torch.ones(8)}
    assert list(Places().compare(stale, version.items()).wrong) == [names[1]]
