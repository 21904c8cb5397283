"""An item of a response's output, while it grows and when it is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_FILLED = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field of each kind of call that events fill piece by piece."""


@dataclass(slots=True)
class OutputItem:
    """Reasoning, a message, or a call of a tool."""

    kind: str
    """reasoning, message, function_call or custom_tool_call"""
    id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    call: dict[str, Any] | None = None
    """The fields of a tool call, as the API has them."""
    heads: list[bytes] = field(default_factory=list)
    """The beginnings of the events that deliver the item's next text."""
    summarized: bool = False
    """True for reasoning that is also form as its own summary."""
    status: str = "in_progress"

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    @property
    def place(self) -> dict[str, Any]:
        """The fields that locate its text."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def content_part(self) -> dict[str, Any]:
        """The one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    @property
    def summary_place(self) -> dict[str, Any]:
        """The place of the summary, as events name it."""
        return {"item_id": self.id, "output_index": self.index, "summary_index": 0}

    @property
    def summary(self) -> list[dict[str, Any]]:
        """The whole reasoning, for clients that read summaries alone; empty where no summary was requested."""
        return [{"type": "summary_text", "text": self.text}] if self.summarized else []

    def empty_form(self) -> dict[str, Any]:
        """Return the item in the API's form, still empty."""
        form = self.api_form()
        name = _FILLED.get(self.kind, "content")
        form[name] = [] if name == "content" else ""
        return form | ({"summary": []} if self.kind == "reasoning" else {})

    def api_form(self) -> dict[str, Any]:
        """Return the item in the API's form."""
        form: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            return form | self.call
        if self.kind == "reasoning":
            return form | {"summary": self.summary, "content": [self.content_part], "encrypted_content": None}
        return form | {"role": "assistant", "content": [self.content_part]}
