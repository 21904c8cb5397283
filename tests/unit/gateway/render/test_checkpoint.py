"""A checkpoint's tokenizer, held against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as auto
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.render import tokenizer_class
from gateway.render.checkpoint import Checkpoint, NeedsTransformers
from gateway.render.environment import environment
from tests.families.family import FAMILIES, named, save

TEXTS = [
    "",
    "hello the hello",
    " a  b\n\n",
    "é日🙂 <|im_end|>x",
    "<s> [INST]hi [/INST]</s>",
    "don 't , ok ?",
    "\u0301e ½",
]
Files = dict[str, Any]


def config(folder: Path, **changed: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def rewritten(folder: Path, name: str, **changed: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changed}))


def same(folder: Path, texts: list[str] = TEXTS) -> Checkpoint:
    found, wanted = Checkpoint.read(folder), AutoTokenizer.from_pretrained(str(folder))
    assert len(found) == len(wanted)
    assert found.special_tokens_map == wanted.special_tokens_map
    assert (found.eos_token_id, found.unk_token_id) == (wanted.eos_token_id, wanted.unk_token_id)
    assert found.chat_template == wanted.chat_template
    assert found.name_or_path == wanted.name_or_path
    tokens = found.backend_tokenizer.get_added_tokens_decoder()
    assert {i: repr(token) for i, token in tokens.items()} == {
        i: repr(token) for i, token in wanted.added_tokens_decoder.items()
    }
    for text in texts:
        ids = found.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == wanted.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            decoded = found.backend_tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == wanted.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    names = ["<|im_end|>", "a", "no such token"]
    assert found.convert_tokens_to_ids(names) == wanted.convert_tokens_to_ids(names)
    return found


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_familys_tokenizer_is_the_one_of_transformers(name: str, tmp_path: Path) -> None:
    save(named(name), tmp_path)
    same(tmp_path)


CHANGED: dict[str, Files] = {
    "spaces are to be cleaned up": {"tokenizer_config.json": {"clean_up_tokenization_spaces": True}},
    "the end is another token": {"tokenizer_config.json": {"eos_token": "<|new_end|>", "pad_token": "<|im_end|>"}},
    "a named token is not a special one yet": {"tokenizer_config.json": {"unk_token": "hello"}},
    "a token with properties": {
        "tokenizer_config.json": {"mask_token": {"__type": "AddedToken", "content": "<m>", "lstrip": True}}
    },
    "extra tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<x>", "hello", "<|im_end|>"]}},
    "extra tokens of old": {"tokenizer_config.json": {"additional_special_tokens": ["<x>"]}},
    "extra tokens with names": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<img>"}}},
    "a model's own token": {"tokenizer_config.json": {"image_token": "<img>", "note": "<no>"}},
    "added tokens listed": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "400": {"content": "<late>", "special": True},
                "271": {"content": "<|im_end|>", "special": True, "rstrip": True},
                "399": {"content": "the", "special": False, "single_word": True},
            }
        }
    },
    "a map of special tokens": {
        "special_tokens_map.json": {
            "cls_token": {"content": "<c>", "rstrip": True, "lstrip": False, "normalized": False},
            "additional_special_tokens": ["<y>"],
        }
    },
    "tokens in a file of their own": {"added_tokens.json": {"<one>": 290, "<|im_end|>": 291}},
    "special tokens are split": {"tokenizer_config.json": {"split_special_tokens": True}},
    "prompts are cut": {"tokenizer.json": {"truncation": {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }}},
    "a type of model with its own class": {"config.json": {"model_type": "qwen3"}},
    "a class without file of its own": {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast"}},
    "the file counts": {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}, "config.json": {"model_type": "mistral"}
    },
}  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED.keys())
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_each_option_of_the_files_means_what_it_means_to_transformers(
    name: str, changed: Files, tmp_path: Path
) -> None:
    save(named(name), tmp_path)
    for file, values in changed.items():
        rewritten(tmp_path, file, **values)
    same(tmp_path)


def test_a_prompt_is_never_cut(tmp_path: Path) -> None:
    save(named("qwen3"), tmp_path)
    rewritten(tmp_path, "tokenizer.json", **CHANGED["prompts are cut"]["tokenizer.json"])
    read = Checkpoint.read(tmp_path).backend_tokenizer
    assert read.decode(read.encode("hello the hello").ids) == "hello the hello"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_5", "gemma3"])
def test_a_class_that_builds_what_the_file_has_is_read_from_the_file(kind: str, tmp_path: Path) -> None:
    folder = built(kind, tmp_path)
    config(folder, chat_template="{{ messages }}")
    same(folder)
    read_without_transformers(folder)


def built(kind: str, folder: Path) -> Path:
    """Return a checkpoint whose tokenizer transformers has built and saved by the class of its type of model."""
    save(named("gemma3" if kind == "gemma3" else "qwen3"), folder)
    rewritten(folder, "config.json", model_type=kind)
    config(folder, tokenizer_class=auto.TOKENIZER_MAPPING_NAMES[kind])
    AutoTokenizer.from_pretrained(str(folder)).save_pretrained(folder)
    return folder


def read_without_transformers(folder: Path) -> Checkpoint:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        return Checkpoint.read(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"config.json": {"model_type": "qwen2"}},
        {"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast"}},
        {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
        {"tokenizer_config.json": {"tokenizer_class": "CohereTokenizerFast"}},
    ],
)
def test_a_class_that_builds_something_else_needs_transformers(changed: Files, tmp_path: Path) -> None:
    """Without transformers the error names what to install."""
    save(named("qwen3"), tmp_path)
    for file, values in changed.items():
        rewritten(tmp_path, file, **values)
    same(tmp_path)
    with pytest.raises(NeedsTransformers, match=r"pip install 'headgate\[trainer\]'"):
        read_without_transformers(tmp_path)


def test_a_llama_whose_words_begin_with_a_space_needs_transformers(tmp_path: Path) -> None:
    save(named("gemma3"), tmp_path)
    config(tmp_path, tokenizer_class="LlamaTokenizer")
    same(tmp_path)
    with pytest.raises(NeedsTransformers, match="LlamaTokenizer"):
        read_without_transformers(tmp_path)


def test_a_vocabulary_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    save(named("qwen3"), tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in model["merges"]))
    config(tmp_path, tokenizer_class="Qwen2Tokenizer")
    same(tmp_path)
    with pytest.raises(NeedsTransformers, match="Qwen2Tokenizer"):
        read_without_transformers(tmp_path)


def test_types_of_models_have_the_classes_of_transformers() -> None:
    names = {kind: (name or "").removesuffix("Fast") for kind, name in auto.TOKENIZER_MAPPING_NAMES.items()}
    assert {kind: names[kind] for kind in tokenizer_class.OWN} == tokenizer_class.OWN
    file = {names[kind] for kind in tokenizer_class._FILE_TYPES}
    assert file <= {"TokenizersBackend", "MistralCommonBackend"}
    always = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert set(tokenizer_class._ALWAYS_OWN) == {kind for kind in always if kind in tokenizer_class.OWN}


@cache
def both(name: str) -> tuple[Checkpoint, Any]:
    folder = Path(mkdtemp())
    save(named(name), folder)
    return Checkpoint.read(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@given(
    text=st.lists(st.sampled_from([*TEXTS, "<start_of_turn>", "<think>", "▁", "\t"]) | st.text()).map("".join)
)
def test_every_text_has_the_ids_of_transformers(name: str, text: str) -> None:
    found, wanted = both(name)
    assert found.backend_tokenizer.encode(text, add_special_tokens=False).ids == wanted.encode(
        text, add_special_tokens=False
    )


def test_several_templates(tmp_path: Path) -> None:
    save(named("qwen3"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    found = same(tmp_path)
    assert (found.template(False), found.template(True)) == ("one", "with tools")


def test_templates_in_the_configuration(tmp_path: Path) -> None:
    save(named("qwen3"), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    listed = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "with tools"}]
    config(tmp_path, chat_template=listed)
    assert same(tmp_path).template(True) == "with tools"
    config(tmp_path, chat_template="only")
    assert same(tmp_path).template(True) == "only"
    config(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        same(tmp_path).template(False)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {%- if loop.first %}\n{{ m.content }}{% continue %}{% endif %}"
        "\n x{{ m.role }}{% break %}{% endfor %}",
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}",
        "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}\n{% endgeneration %}{{ x }}{% endfor %}",
        "{{ dict(a=1) }}{{ dict.fromkeys([1, 2]) }}{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}",
        "{% for m in messages %}\n    {% if loop.last %}\n  x\n    {% endif %}\n{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% set ns = namespace(_a=1) %}",
        "{{ namespace.__init__ }}{{ dict.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('not so') }}",
        "{{ messages[5].content }}",
    ],
)
def test_templates_can_do_what_they_can_in_transformers(source: str) -> None:
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "\n b"}]
    try:
        ((wanted,), _) = render_jinja_template([messages], chat_template=source)
    except Exception as error:
        with pytest.raises(type(error)):
            environment().from_string(source).render(messages=messages, tools=None, documents=None)
        return
    assert environment().from_string(source).render(messages=messages, tools=None, documents=None) == wanted
