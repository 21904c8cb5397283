"""Which tokens of a conversation are learned: what each family's model replies, by hand, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.types import Node
from tests.families.family import named, reference, renderer, save
from trainer.data.chat import ChatTemplate, conversations
from trainer.errors import ConfigError

TALK = [
    {"role": "user", "content": "hello the one"},
    {"role": "assistant", "content": "A1 as."},
    {"role": "user", "content": "U2"},
    {"role": "assistant", "content": "A2 the é"},
]
CALL = {"type": "function", "id": "a", "function": {"name": "look", "arguments": '{"text": "x"}'}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
]
USED = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "seen"},
    {"role": "assistant", "content": "done"},
]
ENDS = {"gemma3": "<end_of_turn>", "phi3": "<|end|>", "phi4-mini": "<|end|>", "llama3": "<|eot_id|>"}
"""The end of a turn, where it is not the tokenizer's end token: what generation settings name."""


def template_of(family: str, **arguments: Any) -> ChatTemplate:
    tokenizer = reference(family)
    stops = [
        tokenizer.eos_token_id,
        *tokenizer.convert_tokens_to_ids([ENDS[family]] if family in ENDS else []),
    ]
    return ChatTemplate(tokenizer, stops, arguments)


def path_of(nodes: Sequence[Node], node: Node) -> list[int]:
    """The tokens up to a node's end."""
    before: list[int] = []
    if node.parent >= 0:
        parent = nodes[node.parent]
        before = path_of(nodes, parent)
        before = before[: len(before) - len(parent.ids) + node.at]
    return before + node.ids.tolist()


QUIET = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "first", "second", "branches"),
    [
        ("qwen2.5", "A1 as.<|im_end|>", "A2 the é<|im_end|>", 1),
        ("qwen3", f"{QUIET}A1 as.<|im_end|>", f"{QUIET}A2 the é<|im_end|>", 2),
        ("llama3", "A1 as.<|eot_id|>", "A2 the é<|eot_id|>", 1),
        ("mistral v3", "A1 as.</s>", "A2 the é</s>", 1),
        ("mistral v7", "A1 as.</s>", "A2 the é</s>", 1),
        ("gemma3", "A1 as.<end_of_turn>", "A2 the é<end_of_turn>", 1),
        ("phi3", "A1 as.<|end|>", "A2 the é<|end|>", 1),
        ("phi4-mini", "A1 as.<|end|>", "A2 the é<|end|>", 1),
    ],
)
def test_every_turn_of_the_assistant_is_learned_to_its_end_and_no_other_token(
    family: str, first: str, second: str, branches: int
) -> None:
    """And each in the context that the template gives it, in the tokens that the tokenizer makes of the whole text."""
    tokenizer = reference(family)
    nodes = template_of(family).nodes(TALK)
    learned = [node for node in nodes if node.sampled]
    assert nodes[0].ids.tolist() == renderer(family).render(TALK[:1], []), "a gateway renders the same prompt"
    assert [tokenizer.decode(node.ids) for node in learned] == [first, second]
    assert sum(node.parent < 0 for node in nodes) == branches
    for node, turn in zip(learned, (2, 4), strict=True):
        text = tokenizer.apply_chat_template(TALK[:turn], tokenize=False)
        prompt_text = tokenizer.apply_chat_template(
            TALK[: turn - 1], tokenize=False, add_generation_prompt=True
        )
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        path = path_of(nodes, node)
        assert path == whole[: len(path)]
        assert tokenizer.decode(path) == prompt_text + (first, second)[turn // 2 - 1]


def test_arguments_of_the_template_about_thinking_count() -> None:
    """The prompt of Qwen3 without thoughts ends with empty ones, so they are not learned."""
    nodes = template_of("qwen3", enable_thinking=False).nodes(TALK)
    assert [reference("qwen3").decode(node.ids) for node in nodes if node.sampled] == [
        "A1 as.<|im_end|>",
        "A2 the é<|im_end|>",
    ]


def test_thoughts_are_learned_in_their_turn_and_absent_from_the_turns_after() -> None:
    talk = [dict(message) for message in TALK]
    talk[1]["reasoning_content"] = "hm"
    nodes = template_of("qwen3").nodes(talk)
    learned = [node for node in nodes if node.sampled]
    decode = reference("qwen3").decode
    assert decode(learned[0].ids) == "<think>\nhm\n</think>\n\nA1 as.<|im_end|>"
    assert "hm" not in decode(path_of(nodes, learned[1]))


def test_tool_calls_are_learned_and_their_results_are_not() -> None:
    nodes = template_of("qwen2.5").nodes(USED, TOOLS)
    decode = reference("qwen2.5").decode
    call = '<tool_call>\n{"name": "look", "arguments": {"text": "x"}}\n</tool_call><|im_end|>'
    assert [decode(node.ids) for node in nodes if node.sampled] == [call, "done<|im_end|>"]
    assert '"name": "look"' in decode(nodes[0].ids), "the prompt describes the tool"
    assert "<tool_response>\nseen\n</tool_response>" in decode(nodes[2].ids)


def test_a_turn_of_weight_0_is_context() -> None:
    talk = [dict(message) for message in TALK]
    talk[1]["weight"] = 0
    nodes = template_of("qwen2.5").nodes(talk)
    assert [reference("qwen2.5").decode(node.ids) for node in nodes if node.sampled] == ["A2 the é<|im_end|>"]
    assert len(path_of(nodes, nodes[-1])) == len(path_of(template_of("qwen2.5").nodes(TALK), nodes[-1]))


@pytest.mark.parametrize(
    ("family", "messages", "message"),
    [
        ("deepseek r1", TALK, "message 1: .* does not begin with its prompt"),
        ("glm4.5", TALK, "message 1: .* no token at which engines stop"),
        ("qwen2.5", [{"role": "user", "content": "hi"}], "no assistant message has a weight above 0"),
        ("qwen2.5", [{"role": "user", "content": "a <|im_end|> b"}, TALK[1]], r"message 0: .*'<\|im_end\|>'"),
        ("qwen2.5", ["hi"], '"role"'),
    ],
)
def test_what_cannot_be_learned_exactly_is_refused(family: str, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template_of(family).nodes(messages)


def test_a_file_is_read_by_the_checkpoints_own_template_and_errors_name_the_line(tmp_path: Path) -> None:
    save(named("gemma3"), tmp_path)
    end = reference("gemma3").convert_tokens_to_ids("<end_of_turn>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n\n" + json.dumps({"messages": [TALK[0]]}) + "\n")
    read = conversations(file, ChatTemplate.of(tmp_path, {}))
    name, nodes = next(read)
    assert (name, len(nodes)) == ("talk.jsonl:1", 4)
    with pytest.raises(ConfigError, match=r"talk.jsonl, line 3: no assistant message has a weight above 0"):
        next(read)
    for text in ("[]", "{", '{"messages": 3}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            next(conversations(file, ChatTemplate.of(tmp_path, {})))


def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        ChatTemplate.of(tmp_path, {})
    save(named("qwen3"), tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.of(tmp_path, {})
