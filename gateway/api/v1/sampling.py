"""Turns a request into the sampling parameters of an engine. Pure; errors name the parameter."""

from __future__ import annotations

from gateway.config import SamplingSettings, TokenBounds
from gateway.control.models import ServedModel
from gateway.dialects.request import GenerationRequest, Tool
from gateway.episodes.open_episode import OpenEpisode
from gateway.render.constraints import constraint
from gateway.trajectories.recorder import Prompt
from headgate.errors import BadRequest, invalid
from headgate.types import Grammar, Sampling

_UNBOUNDED = TokenBounds()
_DEFAULT_TEMPERATURE = 1.0
"""The temperature of requests that name none, as in OpenAI's API."""


def tools_of(parsed: GenerationRequest) -> list[Tool]:
    """Return the tools that the prompt describes."""
    return [] if parsed.tool_choice == "none" else parsed.tools


def sampling_of(
    parsed: GenerationRequest,
    limits: SamplingSettings,
    model: ServedModel,
    episode: OpenEpisode,
    prompt: Prompt,
) -> Sampling:
    """Return the parameters to request of the engine: the request's, unless the configuration (training episodes) or the episode
    (evaluation) sets others.

    What the engine makes of them is `gateway.engines.used`. Raise BadRequest.
    """
    own_model = model.name == episode.model
    bounds = limits.max_tokens if own_model and episode.mode == "train" else _UNBOUNDED
    wanted = _wanted(parsed, bounds, model, prompt)
    _check_ids(parsed, model, prompt)
    temperature = _DEFAULT_TEMPERATURE if parsed.temperature is None else parsed.temperature
    top_p = 1.0 if parsed.top_p is None else parsed.top_p
    seed = parsed.seed
    if own_model:
        if episode.mode == "train":
            temperature, top_p = limits.temperature.apply(temperature), limits.top_p.apply(top_p)
            seed = seed if limits.seed == "keep" else None
        own = episode.sampling
        temperature = temperature if own.temperature is None else own.temperature
        top_p = top_p if own.top_p is None else own.top_p
        seed = seed if own.seed == "keep" else None
    return Sampling(
        temperature,
        top_p,
        wanted,
        seed,
        sorted(model.renderer.marks.stop),
        top_k=parsed.top_k,
        min_p=parsed.min_p,
        min_tokens=wanted if parsed.ignore_eos else min(parsed.min_tokens, wanted),
        presence_penalty=parsed.presence_penalty,
        frequency_penalty=parsed.frequency_penalty,
        repetition_penalty=parsed.repetition_penalty,
        logit_bias=parsed.logit_bias,
        top_logprobs=parsed.top_logprobs,
        grammar=_grammar(parsed, model, prompt),
    )


def nth_seed(first: int, n: int) -> int:
    """Return the seed of reply `n` (from 0) to a prompt whose first reply has the seed `first`; int64.

    The seeds differ, and those after the first are never -1, which means no seed to vLLM.
    """
    seed = first + n + (first < -1 <= first + n)
    return seed - 2**64 if seed >= 2**63 else seed


def _wanted(parsed: GenerationRequest, bounds: TokenBounds, model: ServedModel, prompt: Prompt) -> int:
    """Return the most tokens that the reply may take: what was requested, within the bounds and the context."""
    longest = model.settings.max_model_len
    room = longest - len(prompt.ids)
    if len(prompt.ids) == 0:
        raise BadRequest("the prompt has no tokens", code="invalid_value", param="prompt")
    param = "prompt" if parsed.prompts else "messages"
    if room < 1:  # clients look for these exact words, and then shorten the conversation
        message = f"{param}: prompt is too long: {len(prompt.ids)} tokens > {longest - 1} maximum; shorten it"
        raise BadRequest(message, code="context_length_exceeded", param=param)
    own = parsed.max_tokens or room
    if parsed.max_tokens_may_exceed:
        own = min(own, room)
    if parsed.min_tokens > own:
        raise invalid(
            "min_tokens",
            f"{parsed.min_tokens} is more than the {own} that the reply may take at most:"
            " lower it, or raise max_tokens",
        )
    wanted = bounds.apply(own, room)
    if wanted > room:
        message = (
            f"{param}: this model's context is {longest} tokens, the prompt takes {len(prompt.ids)}"
            f" and the reply was allowed up to {wanted}: request at most {room}, or shorten the prompt"
        )
        raise BadRequest(message, code="context_length_exceeded", param=param)
    return wanted


def _grammar(parsed: GenerationRequest, model: ServedModel, prompt: Prompt) -> Grammar | None:
    """Return the grammar that constrains the reply, token by token."""
    if parsed.form is None and parsed.tool_choice in ("auto", "none"):
        return None
    renderer = model.renderer
    reasoning = not parsed.prompts and renderer.reasoning_open(prompt.ids[-8:].tolist())
    return constraint(
        renderer, parsed.tools, parsed.tool_choice, parsed.parallel_tool_calls, parsed.form, reasoning
    )


def _check_ids(parsed: GenerationRequest, model: ServedModel, prompt: Prompt) -> None:
    """Raise BadRequest for tokens that the model does not have: engines fail on them."""
    vocabulary = model.renderer.vocabulary
    if any(not 0 <= token < vocabulary for token in parsed.logit_bias):
        message = f"logit_bias names a token outside the vocabulary of {vocabulary}"
        raise BadRequest(message, code="invalid_value", param="logit_bias")
    ends = model.renderer.marks.stop
    if others := [token for token in parsed.stop_token_ids if token not in ends]:
        message = (
            f"stop_token_ids: the token {others[0]} does not end a turn of this model, as {sorted(ends)} do, which need not be"
            " named: send its text as `stop`"
        )
        raise BadRequest(message, code="unsupported_parameter", param="stop_token_ids")
    if parsed.prompts and not (prompt.ids.min() >= 0 and prompt.ids.max() < vocabulary):
        message = f"the prompt has a token outside the vocabulary of {vocabulary}"
        raise BadRequest(message, code="invalid_value", param="prompt")
