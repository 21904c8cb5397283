"""The warm start: its tokenizer, its agreement with the renderer, its cache, and the demo's split of tasks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import Qwen3Renderer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo import tasks
from examples.distill.teacher import careful_teacher
from trainer.commands.warmstart import Recipe, warm_start
from trainer.data.conversations import Rows
from trainer.errors import ConfigError

GIVEN: dict[str, Any] = {
    "data": "examples.demo.tasks:careless_teacher", "steps": 3, "rows": 4, "layers": 1, "hidden": 32, "intermediate": 32,
}  # fmt: skip
RECIPE = Recipe(**GIVEN)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("warmstart")
    assert warm_start(RECIPE, root / "model", cache=root / "cache") is False
    assert warm_start(RECIPE, root / "again", cache=root / "cache") is True
    return root / "model"


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Any:
    return AutoTokenizer.from_pretrained(made)


@pytest.mark.parametrize("text", ["4 + 13 - 2 =", "<|im_start|>user\nhi<|im_end|>", "Grüße, 世界 🦙\n\n x"])
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_a_digit_is_a_token_and_so_is_a_mark(tokenizer: Any) -> None:
    assert len(tokenizer.encode("1234567890")) == 10
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("</think><|im_end|>")) == [
        "</think>",
        "<|im_end|>",
    ]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_prompts_are_what_the_renderer_renders(made: Path, tokenizer: Any) -> None:
    rows = Rows(Tokenizer.from_file(str(made / "tokenizer.json")))
    renderer = Qwen3Renderer(tokenizer)
    for question, answer in itertools.islice(RECIPE.stream(9), 20):
        messages = [{"role": "user", "content": question}]
        prompt = renderer.render(messages, add_generation_prompt=True).token_ids
        ids, learned = rows.row((question, answer))
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids[len(prompt) :]) == f"{answer}<|im_end|>"
        assert learned == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 1"},
    ],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "reasoning_content": "hm", "content": "I ask", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "2"},
    ],
]


def test_all_replies_of_the_assistant_are_learned_and_nothing_else(made: Path, tokenizer: Any) -> None:
    rows = Rows(Tokenizer.from_file(str(made / "tokenizer.json")))
    call = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "I ask", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "5"},
    ]
    ids, learned = rows.row({"messages": messages, "tools": [TOOL]})
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    turns = [f"I ask\n{called}\n{called}<|im_end|>", f"{called}<|im_end|>", "5<|im_end|>"]
    runs = [list(run) for _, run in itertools.groupby(zip(ids, learned, strict=True), lambda pair: pair[1])]
    assert [tokenizer.decode([i for i, _ in run]) for run in runs if run[0][1]] == turns
    heard = Qwen3Renderer(tokenizer).render(messages[:7], tools=[TOOL], add_generation_prompt=True)
    assert ids[: len(heard.token_ids)] == heard.token_ids
    assert ids[: len(runs[0])] == Qwen3Renderer(tokenizer).render_ids(
        messages[:2], tools=[TOOL], add_generation_prompt=True
    )


def test_a_conversation_must_end_with_the_assistant(made: Path) -> None:
    rows = Rows(Tokenizer.from_file(str(made / "tokenizer.json")))
    with pytest.raises(ValueError, match="ends with the assistant"):
        rows.row({"messages": [{"role": "user", "content": "1"}]})


def test_the_cache_knows_a_model_by_what_its_data_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RECIPE.digest()
    assert RECIPE.digest() == before
    monkeypatch.setattr(tasks, "SLIP_CHANCE", 0.0)
    assert RECIPE.digest() != before


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_chat_template_agrees_with_the_renderer(tokenizer: Any, messages: Any, tools: Any) -> None:
    rendered = Qwen3Renderer(tokenizer).render(messages, tools=tools, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert text == tokenizer.decode(rendered.token_ids)


def test_model_is_float32_untied_and_has_no_sampling_defaults(made: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(made)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.config.tie_word_embeddings is False
    generation = json.loads((made / "generation_config.json").read_text())
    assert not {"temperature", "top_p", "top_k", "do_sample"} & set(generation)


def test_the_same_recipe_gives_the_same_weights(made: Path, tmp_path: Path) -> None:
    warm_start(RECIPE, tmp_path / "model", cache=tmp_path / "another cache")
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (made / name).read_bytes()


def test_a_recipe_that_continues_another_has_its_tokenizer_and_begins_with_its_weights(
    made: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first.toml"
    first.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in GIVEN.items()))
    teacher = Recipe(
        data="examples.distill.teacher:careful_teacher", continues=first, steps=1, rows=1, lr=1e-30
    )
    warm_start(teacher, tmp_path / "model", cache=tmp_path / "cache")
    for name in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (made / name).read_bytes()
    assert json.loads((tmp_path / "model/warmstart.json").read_text())["data"] == teacher.data


def test_a_recipe_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('data = "a:b"\nsurprise = 1\n')
    with pytest.raises(ConfigError, match="surprise"):
        Recipe.load(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match="nowhere"):
        RECIPE.model_copy(update={"data": "nowhere:f"}).stream(1)


def test_held_out_questions_are_in_no_other_data() -> None:
    held_out = {task["question"] for task in itertools.islice(tasks.tasks("heldout", 5), 200)}
    seen = {task["question"] for task in itertools.islice(tasks.tasks("train", 1), 1000)}
    for teacher in (tasks.careless_teacher, careful_teacher):
        seen |= {question for question, _ in itertools.islice(teacher(1), 3000)}
    assert len(held_out) == 200
    assert not held_out & seen


def test_scores_are_those_of_the_last_word() -> None:
    task = {"question": "4 + 3 - 2 =", "answer": "5"}
    assert tasks.score(task, "7 5") == 1.0
    assert tasks.score(task, "5 7") < 0.5
    assert tasks.score(task, "") == 0.0
    assert tasks.score(task, "7 banana") == 0.0
