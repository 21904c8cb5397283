"""An item of a response's output, while it grows and when it is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class OutputItem:
    """Reasoning, a message, or a function call."""

    kind: str
    """reasoning, message or function_call"""
    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call: dict[str, Any] | None = None
    """The tool call, as the reply has it."""
    head: bytes = b""
    """What its deltas begin with."""
    status: str = "in_progress"

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        """Where its text is."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """The one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def begun(self) -> dict[str, Any]:
        """As the API has it before anything of it was said."""
        shown = self.shown()
        shown["arguments" if self.call else "content"] = "" if self.call else []
        return shown

    def shown(self) -> dict[str, Any]:
        """As the API has it."""
        shown: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            return shown | {"call_id": self.call["id"], **self.call["function"]}
        if self.kind == "reasoning":
            return shown | {"summary": [], "content": [self.part], "encrypted_content": None}
        return shown | {"role": "assistant", "content": [self.part]}
