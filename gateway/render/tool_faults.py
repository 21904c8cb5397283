"""Tool calls of a reply that an agent cannot run, or never gets: found once the reply is whole, if its request had tools. Pure.

A model that writes calls in another form than its template's, or whose calls are cut off, gets a reply as if it had made none,
and its reward does not show that. So these replies are counted, reported by a warning, and marked in the record.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gateway.render.formats import TOOL_FORMS
from headgate.json_depth import loads_strictly

UNPARSED = "unparsed"
"""Text that looks like a call, and is none in the form of the model's template."""
CUT = "cut"
"""The reply ended inside a call."""
NOT_JSON = "not_json"
"""A call whose arguments are not a JSON object."""
UNKNOWN_TOOL = "unknown_tool"
"""A call of a tool that the request does not have."""
TOOL_FAULTS = (UNPARSED, CUT, NOT_JSON, UNKNOWN_TOOL)

_MARKS = tuple((form.start, form.end) for form in TOOL_FORMS)
_SPELLED = re.compile(
    r"""\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:  # JSON without a mark
      | <function=([^>\s]+)>                                              # Qwen3-Coder, Llama's own
      | <invoke\s+name="([^"]+)">                                         # Anthropic's""",
    re.VERBOSE,
)


def tool_faults(
    content: str, calls: Sequence[Mapping[str, Any]], names: Collection[str], *, cut: bool
) -> list[str]:
    """Return the faults of a whole reply, each once, in the order of `TOOL_FAULTS`.

    `content`: its text; `calls`: its tool calls as OpenAI's API has them; `names`: the request's tools (without any, no fault is
    found); `cut`: it ended because of a limit on tokens.
    """
    if not names:
        return []
    found = set()
    if content:
        found |= _written(content, names, cut)
    for call in calls:
        function = call["function"]
        if function["name"] not in names:
            found.add(UNKNOWN_TOOL)
        if not _is_object(function["arguments"]):
            found.add(NOT_JSON)
    return [fault for fault in TOOL_FAULTS if fault in found]


def _written(content: str, names: Collection[str], cut: bool) -> set[str]:
    for start, end in _MARKS:
        at = content.rfind(start)
        if at >= 0:
            return {CUT if cut and (end is None or end not in content[at:]) else UNPARSED}
    spelled = ({group for group in match.groups() if group} for match in _SPELLED.finditer(content))
    return {UNPARSED} if any(called & set(names) for called in spelled) else set()


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(loads_strictly(arguments), dict)
    except ValueError:
        return False
