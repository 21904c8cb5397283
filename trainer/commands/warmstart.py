"""Makes a small model with the Qwen3 architecture and a tokenizer of its own, by a short supervised run.

It exists so that everything can be tried where no model can be downloaded. The result is an ordinary Hugging Face checkpoint.
Invariants: the same recipe gives the same weights on the same machine; a finished model is cached under the hash of its recipe
and of the code that made it, so that a second call only copies files.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from headgate.configuration import (
    Section,
    Unreadable,
    complaints,
    read_toml,
)
from trainer.config.model import Dtype
from trainer.data import conversations
from trainer.data.chat_template import CHATML_TEMPLATE
from trainer.data.conversations import Example, Rows
from trainer.errors import ConfigError
from trainer.model.pretrained import DTYPES

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Those of Qwen3 on which its renderer depends."""
_MARKS = "|".join(map(re.escape, SPECIAL_TOKENS))
_TOKENIZER_SAMPLES = 2000
"""Conversations on which a tokenizer is trained."""
_FORMAT = 3
_FIRST = 64
"""Conversations that the cache's key covers."""


class Recipe(Section):
    """A warm start; the TOML file's keys. `data` is needed, the rest has defaults."""

    data: str = Field(pattern=r"^[\w.]+:\w+$")
    """`module:function`; called with a seed it yields endless conversations: pairs (question, reply), or objects with
    `messages` and optionally `tools`, in the form of OpenAI's fine-tuning files. The assistant's messages are learned."""
    seed: int = Field(1, ge=0)
    steps: int = Field(500, ge=1, le=100_000)
    rows: int = Field(128, ge=1, le=65_536)
    """Conversations per step."""
    lr: float = Field(2e-3, gt=0, le=1)
    """The highest learning rate: warmed up over a twentieth of the steps, then lowered linearly to 0."""
    threads: int = Field(1, ge=1, le=256)
    vocabulary: int = Field(352, ge=256 + len(SPECIAL_TOKENS), le=65_536)
    """The most tokens, specials included."""
    split: str = r" ?\p{N}| ?[+\-*/=]|\r?\n"
    """The pre-tokenizer's regular expression: digits and signs are tokens of their own, so that sums can be learned. The
    text between them, such as the sentence around every question, may become one token, which makes prompts short."""
    hidden: int = Field(128, ge=16)
    layers: int = Field(3, ge=1)
    heads: int = Field(2, ge=1)
    head_dim: int = Field(64, ge=16)
    """A size that vLLM's attention supports: 32, 64, 96, 128, ..."""
    intermediate: int = Field(384, ge=16)
    context: int = Field(2048, ge=64)
    """`max_position_embeddings`."""
    continues: Path | None = None
    """Another recipe, whose finished model this one trains further, with its tokenizer and its sizes."""

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read a TOML file. Raise ConfigError."""
        try:
            return cls.model_validate(read_toml(path))
        except Unreadable as error:
            raise ConfigError(str(error)) from error
        except ValidationError as error:
            raise ConfigError("\n  ".join([f"{path}:", *complaints(error, cls)])) from error

    def stream(self, seed: int) -> Iterator[Example]:
        """Return the conversations that `data` names. Raise ConfigError for an unknown name."""
        return _named(self.data)(seed)

    def digest(self) -> str:
        """Return the key of this model in the cache: a digest of the recipe, the sources of data and model, and the first
        conversations."""
        sources = [inspect.getsource(inspect.getmodule(_named(self.data)) or _named(self.data))]
        sources += [Recipe.load(self.continues).digest()] if self.continues else []
        sources += [inspect.getsource(module) for module in (sys.modules[__name__], conversations)]
        # Changes in what the data's module imports, such as a tool's description, show in its output.
        sources += [json.dumps(example) for example in itertools.islice(self.stream(self.seed), _FIRST)]
        sources += [CHATML_TEMPLATE, str(_FORMAT), torch.__version__]
        text = "\n".join([self.model_dump_json(), *sources])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named(spec: str) -> Callable[[int], Iterator[Example]]:
    module, _, name = spec.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Callable[[int], Iterator[Example]] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"data = {spec!r}: {error}") from error
    return function


def cache_root() -> Path:
    """Return where finished models are kept: `$XDG_CACHE_HOME/headgate/warmstart`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headgate" / "warmstart"


def warm_start(
    recipe: Recipe,
    out: Path,
    *,
    dtype: Dtype = "float32",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> bool:
    """Put the recipe's model into `out`, in `dtype`. Make it first unless it is cached, in float32; return whether it was."""
    finished = (cache or cache_root()) / recipe.digest()
    cached = (finished / "model.safetensors").exists()
    if not cached:
        temporary = finished.with_name(f".{finished.name}.tmp-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        if recipe.continues is not None:
            warm_start(Recipe.load(recipe.continues), temporary, cache=cache, progress=progress)
        make(recipe, temporary, progress)
        shutil.rmtree(finished, ignore_errors=True)
        temporary.rename(finished)
    shutil.copytree(finished, out, dirs_exist_ok=True)
    if dtype != "float32":
        _convert(out, dtype)
    return cached


def _convert(checkpoint: Path, dtype: Dtype) -> None:
    """Round the weights of a checkpoint, and name their dtype in its configuration."""
    file, config = checkpoint / "model.safetensors", checkpoint / "config.json"
    state = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    _write_json(config, json.loads(config.read_bytes()) | {"dtype": dtype})


def make(recipe: Recipe, directory: Path, progress: Progress | None = None) -> None:
    """Train tokenizer and model, and write them as a Hugging Face checkpoint, weights in float32.

    If there is one in `directory`, train it further.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    if directory.exists():
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(recipe)
        model = build_model(recipe, tokenizer)
    _fit(model, tokenizer, recipe, progress)
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory, recipe.context)
    model.save_pretrained(directory)
    # transformers writes sampling defaults, which a serving engine would silently apply.
    _write_json(directory / "generation_config.json", {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    })  # fmt: skip
    _write_json(directory / "warmstart.json", recipe.model_dump(mode="json"))


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Return a byte-level BPE tokenizer whose merges are learned on the recipe's conversations, as they are rendered."""
    alphabet = sorted(pre.ByteLevel.alphabet())
    letters = _tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []), recipe.split)
    _add_marks(letters)
    rows = Rows(letters)
    examples = itertools.islice(recipe.stream(recipe.seed), _TOKENIZER_SAMPLES)
    texts = (letters.decode(rows.row(example)[0], skip_special_tokens=False) for example in examples)
    tokenizer = _tokenizer(models.BPE(), recipe.split)
    trainer = BpeTrainer(
        vocab_size=recipe.vocabulary - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((part for text in texts for part in re.split(_MARKS, text)), trainer)
    _add_marks(tokenizer)
    return tokenizer


def _tokenizer(model: models.Model, split: str) -> Tokenizer:
    """Return the tokenizer around the merges."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence([
        pre.Split(Regex(split), "isolated"),
        pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_marks(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([
        AddedToken(token, special=token.startswith("<|"), normalized=False)
        for token in SPECIAL_TOKENS
    ])  # fmt: skip


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write tokenizer.json and a tokenizer_config.json that `AutoTokenizer` and vLLM load."""
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    })  # fmt: skip


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """Return the untrained model, float32."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _fit(model: Any, tokenizer: Tokenizer, recipe: Recipe, progress: Progress | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), fused=True)
    warmup = max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (recipe.steps - step) / recipe.steps)
    )
    stream, rows = recipe.stream(recipe.seed + 1), Rows(tokenizer)
    model.train()
    bar = progress.add_task("warm start", total=recipe.steps) if progress else None
    for _ in range(recipe.steps):
        ids, labels = _collate([rows.row(example) for example in itertools.islice(stream, recipe.rows)])
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if progress and bar is not None:
            progress.update(bar, advance=1, description=f"warm start, loss {loss.item():.3f}")
    model.eval()


def _collate(rows: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64, shape (rows, longest); labels are -100 except for the assistant's tokens."""
    longest = max(len(row) for row, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, (row, sampled) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(row)] = torch.where(torch.tensor(sampled), ids[i, : len(row)], -100)
    return ids, labels


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
