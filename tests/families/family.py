"""The families that the tests run over, and tokenizers for them.

The vocabularies are bytes, a few merges (so that one text has several tokenizations, and a boundary in the wrong place shows) and
the family's own marks, each one token as in the real model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.config import ModelSettings
from gateway.render.renderer import ChatRenderer

TEMPLATES = Path(__file__).parent / "templates"
MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ċ Ċ",
    "Ġ t",
    "Ġt he",
    "< |",
    "> Ċ",
    ". Ċ",
    "a s",
    "s i",
    '" :',
    "} }",
    "Ã ©",
]

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKS = (*_HERMES, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *(
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
)
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[TOOL_CONTENT]"),
)
_PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PHI4 = (*_PHI, "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True)
class Family:
    """One way to render: a template, its marks, and the `family` setting that selects it."""

    name: str
    template: str
    specials: tuple[str, ...]
    eos: str
    bos: str | None = None
    marks: tuple[str, ...] = ()
    """Marks that are tokens, but not special ones."""
    family: str = "template"
    thinking: bool = True
    thinks: bool = False
    """Its template knows reasoning."""
    tools: bool = True
    """Its template knows tools."""
    systems: bool = True
    parallel: bool = True
    """Several calls in one reply."""
    pieces: bool = False
    """A tokenizer in SentencePiece's form instead of a byte-level one."""


FAMILIES = [
    Family("qwen3", "qwen3", _CHATML, "<|im_end|>", marks=(*_THINK, *_HERMES), thinks=True),
    Family(
        "qwen3 (library)",
        "qwen3",
        _CHATML,
        "<|im_end|>",
        marks=(*_THINK, *_HERMES),
        family="qwen3",
        thinks=True,
    ),
    Family(
        *("qwen3, thinking off (library)", "qwen3", _CHATML, "<|im_end|>"),
        marks=(*_THINK, *_HERMES),
        family="qwen3",
        thinking=False,
    ),
    Family("qwen2.5", "qwen2_5", _CHATML, "<|im_end|>", marks=_HERMES),
    Family("llama3", "llama3_1", _LLAMA, "<|eot_id|>", "<|begin_of_text|>", parallel=False),
    Family(
        "llama3 (library)",
        "llama3_1",
        _LLAMA,
        "<|eot_id|>",
        "<|begin_of_text|>",
        family="llama-3",
        parallel=False,
    ),
    Family("mistral v3", "mistral_v3", _MISTRAL, "</s>", "<s>"),
    Family("mistral v7", "mistral_v7", _MISTRAL, "</s>", "<s>"),
    Family("gemma3", "gemma3", _GEMMA, "<eos>", "<bos>", tools=False, pieces=True),
    Family(
        *("deepseek v3", "deepseek_v3", _DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        marks=_THINK,
        thinks=True,
    ),
    Family(
        *(
            "deepseek v3 (library)",
            "deepseek_v3",
            _DEEPSEEK,
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
        ),
        family="deepseek-v3",
    ),
    Family(
        *("deepseek r1", "deepseek_r1", _DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        marks=_THINK,
        thinks=True,
        tools=False,
    ),
    Family("glm4.5", "glm4_5", _GLM, "<|endoftext|>", marks=_GLM_MARKS, thinks=True),
    Family(
        "glm4.5 (library)", "glm4_5", _GLM, "<|endoftext|>", marks=_GLM_MARKS, family="glm-4.5", thinks=True
    ),
    Family("phi3", "phi3", _PHI, "<|endoftext|>", tools=False),
    Family("phi4-mini", "phi4_mini", _PHI4, "<|endoftext|>"),
]


_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|object_ref_start|>")
_EVERY = {s: None for group in (_CHATML, _LLAMA, _GLM, _DEEPSEEK, _VISION) for s in group}


@cache
def of_library(name: str) -> ChatRenderer:
    """A renderer of the library by its name, with a tokenizer that has the marks of all of them."""
    marks = tuple(dict.fromkeys((*_THINK, *_HERMES, *_GLM_MARKS)))
    family = Family(name, "qwen3", tuple(_EVERY), "<|endoftext|>", "<s>", marks, family=name)
    with TemporaryDirectory() as directory:
        save(family, Path(directory))
        return ChatRenderer.load(ModelSettings(path=Path(directory), family=name))


def save(family: Family, directory: Path) -> None:
    """Write a tokenizer with the family's template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = _pieces() if family.pieces else _bytes()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in family.specials])
    backend.add_tokens([AddedToken(s, special=False, normalized=False) for s in family.marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos)
    fast.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    fast.save_pretrained(directory)


@cache
def renderer(name: str) -> ChatRenderer:
    """A family's renderer, loaded from files as a checkpoint's is."""
    family = named(name)
    with TemporaryDirectory() as directory:
        save(family, Path(directory))
        settings = ModelSettings(path=Path(directory), family=family.family, thinking=family.thinking)
        return ChatRenderer.load(settings)


@cache
def reference(name: str) -> Any:
    """A family's tokenizer as transformers loads it."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as directory:
        save(named(name), Path(directory))
        return AutoTokenizer.from_pretrained(directory)


def named(name: str) -> Family:
    """The family of that name."""
    return next(family for family in FAMILIES if family.name == name)


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["▁", *map(chr, range(33, 127)), "he", "ll", "\n", "▁t"]
    merges = [("h", "e"), ("l", "l"), ("▁", "t")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend
