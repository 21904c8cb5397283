"""Training examples as the gateway would have recorded them: which tokens, and which of them the model must sample.

Owns the agreement with the gateway's Qwen3 rendering: the first prompt is rendered, every later one is bridged from the existing
tokens, and the assistant's messages are encoded as they are sampled, without the empty thoughts that the template adds to a
finished conversation. A test sends the same conversations through a gateway and compares the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from renderers import Qwen3Renderer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"

Example = tuple[str, str] | Mapping[str, Any]
"""A question and its answer; or `messages` and optionally `tools`, in the form of OpenAI's fine-tuning files."""


class Rows:
    """Turns examples into rows with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
        self._renderer = Qwen3Renderer(fast)

    def row(self, example: Example) -> tuple[list[int], list[bool]]:
        """Return token ids, and for each whether it is the assistant's. Raise ValueError if the last message is not."""
        messages, tools = _parts(example)
        ids: list[int] = []
        sampled: list[bool] = []
        pending: list[dict[str, Any]] = []
        before = 0
        for message in messages:
            if message["role"] != "assistant":
                pending.append(message)
                continue
            prompt = self._prompt(ids, before, pending, tools)
            reply = self._tokenizer.encode(sampled_text(message), add_special_tokens=False).ids
            before = len(prompt)
            sampled += [False] * (before - len(sampled)) + [True] * len(reply)
            ids, pending = prompt + reply, []
        if pending or not ids:
            raise ValueError("a conversation to learn from ends with the assistant")
        return ids, sampled

    def _prompt(
        self, ids: list[int], before: int, pending: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return the prompt of the next turn: `ids`, followed by `pending`; the first `before` ids were the previous prompt."""
        if not ids:
            return list(self._renderer.render_ids(pending, tools=tools, add_generation_prompt=True))
        bridged = self._renderer.bridge_to_next_turn(ids[:before], ids[before:], pending, tools=tools)
        if bridged is None:
            raise ValueError("the template does not continue after an assistant's turn with these messages")
        return list(bridged.token_ids)


def sampled_text(message: Mapping[str, Any]) -> str:
    """Return the text that the model samples for an assistant's message, with its end."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts) + END


def _parts(example: Example) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    if isinstance(example, tuple):
        question, answer = example
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None
    messages = [{**message, "content": message.get("content") or ""} for message in example["messages"]]
    return messages, list(example.get("tools") or ()) or None
