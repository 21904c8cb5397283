"""Attributes of a call's spans, by the semantic conventions for generative AI, without text (docs/topics/telemetry.md).

The conventions are in development; names are those of github.com/open-telemetry/semantic-conventions-genai of 2026-11.
"""

from __future__ import annotations

from gateway.generation.call import Call
from gateway.generation.slot import Slot
from gateway.telemetry.base import Fact, Facts
from gateway.trajectories.recorder import TurnDetails

WAIT, ENGINE, COMMIT = "placement wait", "engine request", "commit"
"""The steps of a call."""
_OPERATIONS = {"completions": "text_completion"}
"""The operations of dialects other than chat."""


def name_of(api: str, model: str) -> str:
    """Return the name of a call's span."""
    return f"{_OPERATIONS.get(api, 'chat')} {model}"


def requested(call: Call, details: TurnDetails, model: str) -> Facts:
    """Return the attributes of a call's span that are known at its beginning."""
    used = call.sampling
    facts: dict[str, Fact] = {
        "gen_ai.operation.name": _OPERATIONS.get(details.api, "chat"),
        "gen_ai.provider.name": "headgate",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": used.max_tokens,
        "gen_ai.request.temperature": used.temperature,
        "gen_ai.request.top_p": used.top_p,
        "gen_ai.request.stream": bool(details.stream),
        "gen_ai.conversation.id": call.episode_id,
        "gen_ai.response.id": call.call_id,
        "headgate.api": details.api,
    }
    if used.seed is not None:
        facts["gen_ai.request.seed"] = used.seed
    if used.top_k:
        facts["gen_ai.request.top_k"] = used.top_k
    return facts


def completed(call: Call, details: TurnDetails, prompt_tokens: int) -> Facts:
    """Return the attributes of a call's span that are known at its end."""
    turn = call.turn
    facts: dict[str, Fact] = {
        "gen_ai.response.finish_reasons": [details.finish_reason],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": len(turn.ids),
        "headgate.versions": sorted({span.version for span in turn.spans}),
        "headgate.pauses": turn.pauses,
        "headgate.restarts": call.restarts,
    }
    if details.stream and details.first_token_s is not None:
        facts["gen_ai.response.time_to_first_chunk"] = details.first_token_s
    return facts


def engine_facts(slot: Slot) -> Facts:
    """Return the attributes of the engine in which a call runs."""
    return {"headgate.engine": slot.name, "headgate.version": slot.version}
