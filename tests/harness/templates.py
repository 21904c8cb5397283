"""Chat templates that more than one test uses."""

from __future__ import annotations

EFFORT_TEMPLATE = """{%- set effort = reasoning_effort | default("medium") -%}
{%- if effort not in ["low", "medium", "high"] %}{{ raise_exception("no such effort") }}{% endif -%}
<|im_start|>system
Reasoning: {{ effort }}<|im_end|>
{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that takes an effort, in the way of gpt-oss, and refuses those that it does not know."""
