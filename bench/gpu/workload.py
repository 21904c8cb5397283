"""The workload of the check: a random model of a published shape, its tokenizer, and episodes of a known size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, Literal

THREADS: dict[str, int | None] = {"cpu": 1, "cuda": None}
"""PyTorch's threads by device; on the CPU the engine needs the others."""
ROOT = Path(__file__).parents[2]
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_BYTES = 256
END = _BYTES + _SPECIALS.index("<|im_end|>")
"""The token that ends a reply."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's shape, and the episodes of a step."""

    name: str
    config: dict[str, Any]
    """The model's `config.json`."""
    dtype: Literal["float32", "bfloat16"]
    groups: int
    members: int
    """Episodes in a group."""
    prompt: int
    """Bytes, which are tokens, of a question."""
    reply: int
    """The most tokens of a response; a random model seldom ends one itself."""
    micro_batch: int
    """Tokens that go through the model together."""
    row: int
    """The length of an episode while the trainer is measured alone."""
    rows: int
    """Episodes of a step then."""

    @property
    def context(self) -> int:
        """The longest request: question, response, and what a template adds."""
        return self.prompt + self.reply + 256


def qwen3_0_6b() -> Workload:
    """Return Qwen3-0.6B as published; alone as in prime-rl's benchmark: two rows of 16,384 tokens, all activations recomputed."""
    config = json.loads((ROOT / "recipes/shapes/Qwen3-0.6B/config.json").read_text())
    return Workload(
        "qwen3-0.6b", config, "bfloat16", groups=4, members=8, prompt=512, reply=4096, micro_batch=16_384, row=16_384, rows=2
    )  # fmt: skip


def tiny() -> Workload:
    """Return a shape that a test computes in seconds: that of the tests' models, so that it runs in their engine."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "vocab_size": 272,
        "max_position_embeddings": 1024, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return Workload(
        "tiny", config, "float32", groups=2, members=2, prompt=40, reply=12, micro_batch=256, row=64, rows=2
    )


WORKLOADS = {"qwen3-0.6b": qwen3_0_6b, "tiny": tiny}


def write_model(folder: Path, workload: Workload, device: str = "cpu") -> None:
    """Write random weights, in the precision of the workload and made on `device`, and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(1)
    values = {key: value for key, value in workload.config.items() if key not in ("model_type", "dtype")}
    values |= {"eos_token_id": END, "pad_token_id": _BYTES, "bos_token_id": None, "dtype": workload.dtype}
    config = AutoConfig.for_model(workload.config["model_type"], **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, workload.dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are bytes. All others, which only a random model samples, are three letters each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    others = ("".join(letters) for letters in product(ascii_letters + digits, repeat=3))
    known = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIALS, *_MARKS]
    tokens = [*known, *islice(others, vocabulary - len(known))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in _SPECIALS])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in _MARKS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)


def write_tasks(path: Path, workload: Workload, count: int) -> None:
    """Write questions of the workload's length, no two alike."""
    with path.open("w") as file:
        for number in range(count):
            question = (f"question {number} " + "the quick brown fox " * workload.prompt)[: workload.prompt]
            task = {"task_id": str(number), "question": question, "max_tokens": workload.reply}
            file.write(json.dumps(task) + "\n")
