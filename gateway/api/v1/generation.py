"""Turns a request into the replies of its response, the same way for every dialect:

identify the caller -> admit -> parse (the dialect's part) -> find the episode -> for each choice look for a reply that exists,
else prepare its prompt and sampling and start one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from gateway.api.context import Services
from gateway.api.v1.admission import EPISODE_HEADER, Admission
from gateway.api.v1.images import load_image, read_images, store_images
from gateway.api.v1.sampling import nth_seed, sampling_of, tools_of
from gateway.control.models import ServedModel
from gateway.dialects.request import GenerationRequest, Message
from gateway.engines.process import api_of
from gateway.engines.used import used
from gateway.episodes.auto_open import NO_CONSENT
from gateway.episodes.consent import consent_of
from gateway.episodes.open_episode import OpenEpisode
from gateway.generation import span_attributes
from gateway.generation.call import Call
from gateway.generation.call_runner import CallRunner
from gateway.generation.completion import Completion, Segment, TokenAccount
from gateway.generation.reply import Choices, Reader
from gateway.generation.request_key import RequestKey
from gateway.render.offload import offload, offload_read
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import ReplyFormat
from gateway.render.stops import StopStrings
from gateway.trajectories.recorder import Prompt, TurnDetails
from headgate.types import Sampling, TokenFlag

WHOLE_INTERVAL = 16
"""Tokens per chunk from the engine for replies that are not streamed."""
_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


@dataclass(frozen=True, slots=True)
class Generation:
    """The replies that were opened for a request."""

    choices: Choices
    episode: OpenEpisode
    model: ServedModel
    messages: list[Message]
    """The conversation, with its images by name."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that name the episode."""
        return {EPISODE_HEADER: self.episode.id}


async def generate(
    admission: Admission, model: ServedModel, parsed: GenerationRequest, body: bytes
) -> Generation:
    """Open a reply for each choice. Raise BadRequest, Busy, Unavailable or Conflict before anything is sampled."""
    arrival = Arrival(time.time(), time.monotonic())
    gateway, key = admission.gateway, await admission.key(body)
    admission.reserve(model, parsed, key)
    parsed, images = await read_images(gateway, parsed)
    episode = await _episode(admission, model, parsed, body, key)
    key = key.of_episode(episode.id)
    readers: list[Reader] = []
    try:
        await store_images(gateway, episode.id, parsed.messages, images)
        segment = await offload(parsed.stop, lambda: _format(parsed, model.renderer))
        preparation = _Preparation(admission, arrival, episode, model, parsed, segment)
        if len(parsed.prompts) > 1:
            await preparation.check()
        for index in range(parsed.choices):
            choice = key.choice(index)
            async with gateway.replies.claim(choice, episode.calls, segment) as claim:
                reader = claim.reader
                if reader is None:
                    reader = await gateway.replies.start(claim, await preparation.completion(index, choice))
            readers.append(reader)
    except BaseException:
        for index in range(len(readers), parsed.choices):
            gateway.replies.refused(key.choice(index))
        for reader in readers:
            await reader.leave(False)
        if admission.caller.agent:
            await gateway.agents.failed(episode)
        raise
    return Generation(Choices(readers), episode, model, parsed.messages)


async def _episode(
    admission: Admission, model: ServedModel, parsed: GenerationRequest, body: bytes, key: RequestKey
) -> OpenEpisode:
    """Return the caller's episode, or under an agent's key the one of the conversation. Raise Conflict if it is over."""
    caller, gateway = admission.caller, admission.gateway
    consent = consent_of(admission.headers, parsed.recorded) if caller.agent else None
    if caller.episode is not None:
        episode = await gateway.callers.still_open(caller.episode, caller.attempt)
    else:
        messages = parsed.messages or await offload_read(body, lambda: _as_messages(parsed.prompts))
        episode = await gateway.agents.episode(caller, messages, parsed.tools, key, model.name, consent)
    if consent is False:
        await gateway.episodes.leave_untrained(episode, NO_CONSENT)
    admission.call.found(episode, model.name)
    return episode


class Arrival(NamedTuple):
    """The moment at which a request had arrived whole."""

    at: float
    monotonic: float


class _Preparation:
    """Prepares the calls of one request's choices. Each prompt is rendered once."""

    def __init__(
        self,
        admission: Admission,
        arrival: Arrival,
        episode: OpenEpisode,
        model: ServedModel,
        parsed: GenerationRequest,
        segment: Segment,
    ) -> None:
        self._admission = admission
        self._gateway = admission.gateway
        self._arrival = arrival
        self._episode = episode
        self._model = model
        self._parsed = parsed
        self._segment = segment
        self._prompts: dict[int, Prompt] = {}
        self._samplings: dict[int, Sampling] = {}
        self._id = f"{_PREFIXES[parsed.api]}{secrets.token_hex(12)}"

    async def completion(self, index: int, key: RequestKey) -> Completion:
        """Return the completion of one choice, which has not been started."""
        number, repetition = divmod(index, self._parsed.n)
        prompt = await self._prompt(number)
        sampling = await self._sampling(number)
        if sampling.seed is not None:  # with one seed all replies to a prompt would be equal
            sampling = replace(sampling, seed=nth_seed(sampling.seed, repetition))
        self._note_untrained(sampling)
        call = new_call(
            f"{self._id}-{index}" if index else self._id, self._model, self._episode, prompt, sampling
        )
        details = TurnDetails(
            self._parsed.api,
            self._parsed.stream,
            self._parsed.recorded,
            sampling,
            self._arrival.at,
            mask_reason=self._model.mask_reason(self._episode.model),
            request_key=key.stored,
            arrived=self._arrival.monotonic,
        )
        return new_completion(
            self._gateway,
            self._model,
            call,
            prompt,
            details,
            self._segment,
            headers=self._admission.headers,
            account=self._admission.ticket,
        )

    def _note_untrained(self, sampling: Sampling) -> None:
        episode, model = self._episode, self._model.name
        if episode.mode == "train" and episode.model == model:
            recorded = TokenFlag.TRUNCATED if self._model.settings.kept_tokens else TokenFlag.NONE
            self._gateway.untrained.see(model, episode.id, sampling.flags() & ~recorded)

    async def check(self) -> None:
        """Raise BadRequest if one of several prompts cannot be served, before another one is."""
        for number in range(len(self._parsed.prompts)):
            await self._sampling(number)

    async def _sampling(self, number: int) -> Sampling:
        """Return the parameters with which the engine samples a reply; those of a prompt's replies differ only in the seed."""
        if number not in self._samplings:
            prompt, parsed = await self._prompt(number), self._parsed
            settings, model, episode = self._gateway.settings, self._model, self._episode
            api = api_of(settings.engine_of(model.name))
            constrained = parsed.form is not None or parsed.tool_choice not in ("auto", "none")

            def work() -> Sampling:
                return used(api, sampling_of(parsed, settings.sampling, model, episode, prompt))

            measured = (parsed.tools, parsed.form and parsed.form.value)
            self._samplings[number] = await offload(measured, work) if constrained else work()
        return self._samplings[number]

    async def _prompt(self, number: int) -> Prompt:
        if number not in self._prompts:
            parsed, recorder = self._parsed, self._model.recorder
            if parsed.prompts:
                self._prompts[number] = await recorder.encode_prompt(parsed.prompts[number])
            else:
                switches = self._model.renderer.switches(parsed.effort, parsed.thinking)
                self._prompts[number] = await recorder.prepare(
                    self._episode.id, parsed.messages, tools_of(parsed), switches
                )
            try:
                await self._gateway.callers.still_open(self._episode, self._admission.caller.attempt)
            except BaseException:  # the episode's end dropped its token tree, and this read loaded it again
                recorder.forget(self._episode.id)
                raise
        return self._prompts[number]


def _as_messages(prompts: Sequence[str | list[int]]) -> list[Message]:
    """Return the prompts as messages, by which an agent's key finds or opens an episode."""
    return [{"role": "user", "content": str(prompt)} for prompt in prompts]


def _format(parsed: GenerationRequest, renderer: ChatRenderer) -> ReplyFormat:
    """Return how the tokens of the replies are read."""
    stop = StopStrings(parsed.stop) if parsed.stop else None
    if parsed.prompts:
        return ReplyFormat(renderer, stop=stop, raw=True)
    most = None if parsed.parallel_tool_calls else 1
    return ReplyFormat(renderer, tools_of(parsed), stop, most)


def new_call(
    call_id: str, model: ServedModel, episode: OpenEpisode, prompt: Prompt, sampling: Sampling
) -> Call:
    """Return a call of an episode; a call to another model than the episode's may be sampled by any version."""
    return Call(
        call_id,
        prompt.ids,
        sampling,
        episode_id=episode.id,
        min_version=_oldest_version(model, episode),
        images=prompt.images,
        routers=model.routers,
        routes_from=max(prompt.after.length - 1, 0),
        kept=model.settings.kept_tokens if episode.mode == "train" else 0,
    )


def _oldest_version(model: ServedModel, episode: OpenEpisode) -> int:
    """Return the oldest version that may sample an episode's call: the one on trial, if its conversation tries it."""
    if model.name != episode.model:
        return 0
    trial = model.pool.trial
    if trial is not None and trial.tries(episode.agent, episode.created_at, episode.id):
        return trial.version
    return episode.version


def new_completion(
    gateway: Services,
    model: ServedModel,
    call: Call,
    prompt: Prompt,
    details: TurnDetails,
    segment: Segment,
    *,
    headers: Mapping[str, str],
    account: TokenAccount | None = None,
) -> Completion:
    """Return what generates a call's reply."""
    pool, limits = model.pool, gateway.settings.calls
    now = asyncio.get_running_loop().time()
    facts = partial(span_attributes.requested, call, details, model.name)
    runner = CallRunner(
        call,
        pool,
        interval=pool.pace.interval(now) if details.stream else WHOLE_INTERVAL,
        trace=gateway.tracing.call(
            span_attributes.name_of(details.api, model.name), headers, details.received_at, facts
        ),
        load_image=partial(load_image, gateway),
    )
    return Completion(
        runner,
        prompt,
        details,
        segment,
        recorder=model.recorder,
        metrics=gateway.metrics,
        tool_alarm=gateway.tool_alarm,
        grace_s=limits.grace_s,
        account=account,
    )
