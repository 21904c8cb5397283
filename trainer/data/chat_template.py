"""The chat template that the warm-started model ships: the ChatML form of Qwen3, as its tokenizer_config.json carries it.

It renders what the `renderers` library's Qwen3 renderer renders (a test holds the two together), written for this project.
"""

from __future__ import annotations

CHATML_TEMPLATE = r"""
{%- set ns = namespace(query=messages|length - 1, found=false) %}
{%- for m in messages|reverse %}
  {%- set text = m.content if m.content is string else '' %}
  {%- if not ns.found and m.role == 'user' and not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
    {%- set ns.found = true %}{%- set ns.query = messages|length - 1 - loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
  {{- '<|im_start|>system\n' ~ (system ~ '\n\n' if messages[0].role == 'system' else '') }}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
  {%- for tool in tools %}{{- '\n' ~ (tool|tojson) }}{%- endfor %}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
  {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
  {%- set text = m.content if m.content is string else '' %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {%- set thought = '' %}
    {%- if m.reasoning_content is string %}
      {%- set thought = m.reasoning_content %}
    {%- elif '</think>' in text %}
      {%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
      {%- set text = text.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.query and (loop.last or thought) %}
      {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') }}
    {%- else %}
      {{- text }}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
      {%- set f = call.function if call.function else call %}
      {{- '\n' if text or not loop.first else '' }}
      {{- '<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' }}
      {{- f.arguments if f.arguments is string else f.arguments|tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
    {{- '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}
""".strip()
