"""Conversations as token trees: the assistant's messages are learned, everything else is their context.

Owns the agreement between training and sampling: the context of a turn is the chat template's rendering of the messages before
it, with the prompt for the assistant; the turn is what the template adds, up to the token at which engines stop. If a template
rewrites earlier messages (dropped thoughts), the later turn is a separate branch. Invariants: every path is the tokens of the
template's whole text; every turn of the assistant is learned once, except those with `"weight": 0`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from headgate.types import Node
from trainer.errors import ConfigError

Message = Mapping[str, Any]


class ChatTemplate:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, stops: Sequence[int], arguments: Mapping[str, Any]) -> None:
        """Wrap a tokenizer. `stops`: the tokens at which engines stop. `arguments`: those of the template."""
        self._tokenizer = tokenizer
        self._stops = frozenset(stops)
        self._arguments = dict(arguments)
        self._special = {*tokenizer.all_special_tokens, *tokenizer.convert_ids_to_tokens(list(stops))}

    @classmethod
    def of(cls, model: Path, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return the template of a Hugging Face checkpoint. Raise ConfigError without a template, or without an end token."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"[model] path = {str(model)!r}: its tokenizer cannot be read: {error}"
            ) from error
        if not tokenizer.chat_template:
            raise ConfigError(f"[model] path = {str(model)!r}: its tokenizer has no chat template")
        stops = _stops(model, tokenizer)
        if not stops:
            raise ConfigError(
                f"[model] path = {str(model)!r}: no token ends a reply (eos_token, eos_token_id)"
            )
        return cls(tokenizer, stops, arguments)

    def nodes(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[Node, ...]:
        """Return the tree of a conversation. Raise ValueError, naming the message, if it cannot be learned."""
        prepared = [_for_template(message) for message in messages]
        self._check(prepared)
        nodes: list[Node] = []
        path: list[int] = []
        """The tokens up to the last node's end."""
        for number, message in enumerate(prepared):
            if message["role"] != "assistant":
                continue
            prompt, reply = self._turn(prepared, number, tools)
            continues = bool(path) and prompt[: len(path)] == path
            added = prompt[len(path) :] if continues else prompt
            nodes.append(_node(nodes, added, continues, sampled=False))
            nodes.append(_node(nodes, reply, True, sampled=message.get("weight", 1) != 0))
            path = prompt + reply
        if not any(node.sampled for node in nodes):
            raise ValueError("no assistant message has a weight above 0")
        return tuple(nodes)

    def _check(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for text in (message["content"], message.get("reasoning_content")):
                if isinstance(text, str) and (token := next((s for s in self._special if s in text), None)):
                    raise ValueError(f"message {number}: its text holds the special token {token!r}")

    def _turn(
        self, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> tuple[list[int], list[int]]:
        """Return the prompt of a message, and the tokens that the model must sample."""
        prompt_text = self._text(messages[:number], tools, prompts=True)
        text = self._text(messages[: number + 1], tools, prompts=False)
        prompt, ids = self._ids(prompt_text), self._ids(text)
        if not text.startswith(prompt_text) or ids[: len(prompt)] != prompt:
            raise ValueError(
                f"message {number}: the template's text of this reply does not begin with its prompt; [sft] chat_template_kwargs"
                " may fix that, such as those that turn thoughts on or off"
            )
        reply = ids[len(prompt) :]
        end = next((at for at, token in enumerate(reply, 1) if token in self._stops), None)
        if end is None:
            raise ValueError(
                f"message {number}: the template ends this reply with no token at which engines stop"
            )
        return prompt, reply[:end]

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompts: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=prompts,
            tokenize=False,
            **self._arguments,
        )
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _stops(model: Path, tokenizer: Any) -> list[int]:
    """Return the end tokens of the tokenizer and of the checkpoint's generation settings."""
    file = model / "generation_config.json"
    configured = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    named = configured if isinstance(configured, list) else [configured]
    return [token for token in (tokenizer.eos_token_id, *named) if token is not None]


def _node(before: Sequence[Node], ids: Sequence[int], continues: bool, *, sampled: bool) -> Node:
    """Return the next node, after the last one or, if it does not continue it, at the root."""
    parent = len(before) - 1 if continues else -1
    n = len(ids) if sampled else 0
    return Node(
        index=len(before),
        parent=parent,
        at=len(before[parent].ids) if continues else 0,
        sampled=sampled,
        ids=np.array(ids, np.int32),
        logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        flags=np.zeros(n, np.uint8),
    )


def _for_template(message: Any) -> dict[str, Any]:
    """Return a message in the form that templates expect: text instead of null, and arguments of tools as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError('a message is an object with a "role"')
    prepared = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [_with_object(call) for call in calls]
    return prepared


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def conversations(path: Path, template: ChatTemplate) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Yield the conversations of a file of JSON lines, each with its file and line. Raise ConfigError, naming file and line."""
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        try:
            example = json.loads(text)
            if not isinstance(example, dict) or not isinstance(example.get("messages"), list):
                raise ValueError('a conversation is an object with a list "messages"')
            nodes = template.nodes(example["messages"], example.get("tools"))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error
        yield f"{path.name}:{line}", nodes
