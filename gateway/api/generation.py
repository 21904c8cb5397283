"""Turns a request into the replies of its answer, the same way for every dialect:

identify the caller -> parse (the dialect's part) -> find the model and the episode -> render -> open one reply per choice.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request, Response
from starlette.types import Scope

from gateway.api.context import Services, check_placed, credentials, json_object
from gateway.api.images import keep_images, load_image, take_images
from gateway.api.query import check_query
from gateway.api.sampling import nth_seed, sampling_of, tools_of
from gateway.api.scope import EPISODE, call_of, keep_call, keep_ticket, ticket_of
from gateway.api.stream import KEEP_ALIVE, Answer, EventStream, Failure, WholeAnswer, openai_failure
from gateway.control.models import ServedModel
from gateway.dialects.request import GenerationRequest, Message, replies_of
from gateway.engines.process import api_of
from gateway.engines.used import used
from gateway.episodes.callers import Caller
from gateway.episodes.open_episode import OpenEpisode, OtherAttempt
from gateway.episodes.refusals import AskedCall
from gateway.errors import BadRequest, Busy, GatewayError
from gateway.render.offload import offload, offload_read
from gateway.render.renderer import ChatRenderer
from gateway.render.segmenter import Segmenter
from gateway.render.stops import StopStrings
from gateway.rollout import traced
from gateway.rollout.call import Call
from gateway.rollout.call_runner import CallRunner
from gateway.rollout.completion import Completion, Segment
from gateway.rollout.replies import RequestKey
from gateway.rollout.reply import Choices, Reader
from gateway.tenancy.limits import Ticket
from gateway.trajectories.recorder import Prompt, TurnDetails
from gateway.types import Int32Array, Sampling

WHOLE_INTERVAL = 16
"""Tokens per chunk from the engine for replies that are not streamed."""
EPISODE_HEADER = "x-headgate-episode"
_EXPECTED = 2048
"""The most replies of one refused request that are expected back: its body was not validated, and may ask for any number."""
_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


@dataclass(frozen=True, slots=True)
class Generation:
    """The replies that were opened for a request."""

    choices: Choices
    episode: OpenEpisode
    model: ServedModel

    @property
    def headers(self) -> dict[str, str]:
        """Say whose call it was."""
        return {EPISODE_HEADER: self.episode.id}


async def identify(request: Request, gateway: Services) -> Caller:
    """Identifies the caller. Raises NotAuthenticated, NotFound or Conflict, and BadRequest if two episodes are named."""
    prefix, header = request.scope.get(EPISODE, ""), request.headers.get(EPISODE_HEADER, "")
    if prefix and header and prefix != header:
        message = f"the path names the episode {prefix!r}, and the header {EPISODE_HEADER} another"
        raise BadRequest(message, code="invalid_value", param=EPISODE_HEADER)
    if not (key := credentials(request)):
        check_placed(request)
    return await gateway.callers.identify(key, prefix or header)


async def admitted(request: Request, gateway: Services, api: str, query: Collection[str] = ()) -> Caller:
    """Identify the caller and reserve a place for its request until it has been answered. Raise Busy, and as `identify`.

    `query`: the query parameters that the route has.
    """
    received_at = time.time()
    try:
        caller = await identify(request, gateway)
    except OtherAttempt as other:
        keep_call(request.scope, AskedCall(api, received_at, other.episode))
        raise
    keep_call(request.scope, AskedCall(api, received_at, caller.episode))
    check_query(request, query)
    try:
        gateway.database.check()  # refuse now: the sampled tokens could not be recorded
        keep_ticket(request.scope, gateway.limits.admit(caller))
    except Busy:
        body = await request.body()
        sent = await offload_read(body, lambda: _request_key(request, body))
        replies, _ = await offload_read(body, lambda: replies_of(json_object(body)))
        _expect_again(gateway, caller, sent, min(replies, _EXPECTED))
        raise
    return caller


def count_replies(scope: Scope, replies: int, param: str) -> None:
    """Each reply that a request asks for is a call. Raises Busy or BadRequest if its key may not have so many at once."""
    if (ticket := ticket_of(scope)) is not None:
        ticket.widen(replies, param)


def _expect_again(gateway: Services, caller: Caller, sent: RequestKey, choices: int) -> None:
    """Notes that a call was refused before its episode was asked for, so that its retry is given no other call's reply."""
    if caller.episode is None:
        gateway.callers.refused(caller, sent)
        return
    key = replace(sent, episode_id=caller.episode.id)
    for index in range(choices):
        gateway.replies.refused(key.choice(index))


def respond(
    gateway: Services,
    generation: Generation,
    answer: Answer,
    stream: bool | None,
    failure: Failure = openai_failure,
    headers: Mapping[str, str] | None = None,
    keep_alive: bytes = KEEP_ALIVE,
) -> Response:
    """The response with a dialect's answer, as server-sent events or whole. `headers`: beside the generation's."""
    headers = {**generation.headers, **(headers or {})}
    if not stream:
        return WholeAnswer(answer.whole, generation.choices, headers)
    keep_alive_s = gateway.settings.server.keep_alive_s
    return EventStream(answer.events, keep_alive_s, failure, generation.choices, headers, keep_alive)


async def generate(
    request: Request,
    gateway: Services,
    caller: Caller,
    model: ServedModel,
    asked: GenerationRequest,
    body: bytes,
) -> Generation:
    """Opens a reply for each choice. Raises BadRequest, Busy, Unavailable or Conflict before anything is sampled."""
    received_at, arrived = time.time(), time.monotonic()
    sent = await offload_read(body, lambda: _request_key(request, body))
    param = "prompt" if len(asked.prompts) > 1 else "n"
    try:
        count_replies(request.scope, asked.choices, param)
        if asked.choices > 1 and not sent.retry:  # a retry may find replies that are complete already
            model.pool.check_room(asked.choices, param)
    except GatewayError:
        _expect_again(gateway, caller, sent, asked.choices)
        raise
    images = await take_images(gateway, asked)
    messages = asked.messages or await offload_read(body, lambda: _as_messages(asked.prompts))
    episode = await gateway.callers.episode(caller, messages, asked.tools, sent, model.name)
    if (call := call_of(request.scope)) is not None:
        call.episode, call.model = episode, model.name
    key = replace(sent, episode_id=episode.id)
    ticket = ticket_of(request.scope)
    readers: list[Reader] = []
    try:
        await keep_images(gateway, episode.id, asked, images)
        segment = await offload(asked.stop, lambda: _segment(asked, model.renderer))
        opening = _Opening(gateway, caller, episode, model, asked, segment, received_at, arrived, ticket)
        opening.headers = request.headers
        if len(asked.prompts) > 1:
            await opening.check()
        for index in range(asked.choices):
            begin = opening.begin(index, key.choice(index))
            readers.append(
                await gateway.replies.open(key.choice(index), episode.calls, begin, opening.segment)
            )
    except BaseException:
        for index in range(len(readers), asked.choices):
            gateway.replies.refused(key.choice(index))
        for reader in readers:
            await reader.leave(False)
        await gateway.callers.failed(episode)
        raise
    return Generation(Choices(readers), episode, model)


class _Opening:
    """The shared part of a request's choices: above all the prompts, each of which is rendered once."""

    def __init__(
        self,
        gateway: Services,
        caller: Caller,
        episode: OpenEpisode,
        model: ServedModel,
        asked: GenerationRequest,
        segment: Segment,
        received_at: float,
        arrived: float,
        ticket: Ticket | None,
    ) -> None:
        self._gateway = gateway
        self._caller = caller
        self._episode = episode
        self._model = model
        self._asked = asked
        self._received_at = received_at
        self._arrived = arrived
        self._ticket = ticket
        self._prompts: dict[int, Prompt] = {}
        self._samplings: dict[int, Sampling] = {}
        self._id = f"{_PREFIXES[asked.api]}{secrets.token_hex(12)}"
        self.segment = segment
        self.headers: Mapping[str, str] = {}
        """Those of the request: they may name the trace that the calls belong to."""

    def begin(self, index: int, key: RequestKey) -> Callable[[], Awaitable[Completion]]:
        """Returns the function that makes the reply of one choice, if it does not exist yet."""

        async def begin() -> Completion:
            number, repetition = divmod(index, self._asked.n)
            prompt = await self._prepared(number)
            sampling = await self._sampling(number)
            if sampling.seed is not None:  # with one seed all replies to a prompt would be equal
                sampling = replace(sampling, seed=nth_seed(sampling.seed, repetition))
            self._note_untrained(sampling)
            details = TurnDetails(
                self._asked.api, self._asked.stream, self._asked.recorded, sampling, self._received_at
            )
            details.mask_reason = self._model.mask_reason(self._episode.model)
            details.request_key, details.arrived = key.stored, self._arrived
            call_id = self._id if index == 0 else f"{self._id}-{index}"
            completion = _completion(
                *(self._gateway, self._model, self._episode, call_id, prompt, details, self.segment),
                self.headers,
            )
            if (lengths := self._gateway.lengths) is not None:
                talk = self._asked.messages, self._asked.tools
                completion.finished = lengths.begin(self._model.name, self._episode, completion.call, *talk)
            if self._ticket is not None:
                completion.charge = self._ticket.draw
            return completion

        return begin

    def _note_untrained(self, sampling: Sampling) -> None:
        episode, model = self._episode, self._model.name
        if episode.mode == "train" and episode.model == model:
            self._gateway.untrained.see(model, episode.id, sampling.flags())

    async def check(self) -> None:
        """Raises BadRequest if one of several prompts cannot be answered, before another one is."""
        for number in range(len(self._asked.prompts)):
            await self._sampling(number)

    async def _sampling(self, number: int) -> Sampling:
        """Return the parameters with which the engine samples a reply; those of a prompt's replies differ only in the seed."""
        if number not in self._samplings:
            prompt, asked = await self._prepared(number), self._asked
            settings, model, episode = self._gateway.settings, self._model, self._episode
            api = api_of(settings.engine_of(model.name))
            held = asked.form is not None or asked.tool_choice not in ("auto", "none")
            self._samplings[number] = await offload(
                (asked.tools, asked.form and asked.form.value) if held else (),
                lambda: used(api, sampling_of(asked, settings.sampling, model, episode, prompt)),
            )
        return self._samplings[number]

    async def _prepared(self, number: int) -> Prompt:
        if number not in self._prompts:
            asked, recorder = self._asked, self._model.recorder
            if asked.prompts:
                self._prompts[number] = await recorder.given(asked.prompts[number])
            else:
                switches = self._model.renderer.switches(asked.effort, asked.thinking)
                self._prompts[number] = await recorder.prepare(
                    self._episode.id, asked.messages, tools_of(asked), switches
                )
            try:
                await self._gateway.callers.still_open(self._episode, self._caller.attempt)
            except BaseException:  # the episode's end dropped its token tree, and this read loaded it again
                recorder.forget(self._episode.id)
                raise
        return self._prompts[number]


def _as_messages(prompts: Sequence[str | list[int]]) -> list[Message]:
    """Prompts as messages, by which an agent's key finds or opens an episode."""
    return [{"role": "user", "content": str(prompt)} for prompt in prompts]


def _request_key(request: Request, body: bytes) -> RequestKey:
    """Returns the key of a request, in whatever episode. An invalid retry count counts as zero."""
    try:
        retries = int(request.headers.get("x-stainless-retry-count", "0"))
    except ValueError:
        retries = 0
    return RequestKey.of("", body, request.headers.get("idempotency-key", ""), retries)


def _segment(asked: GenerationRequest, renderer: ChatRenderer) -> Segment:
    stop = StopStrings(asked.stop) if asked.stop else None

    def segment(prompt: Int32Array) -> Segmenter:
        if asked.prompts:
            return Segmenter(renderer, reasoning=False, stop=stop, raw=True)
        reasoning = renderer.reasoning_open(prompt[-8:].tolist())
        most = None if asked.parallel_tool_calls else 1
        return Segmenter(renderer, reasoning=reasoning, tools=tools_of(asked), stop=stop, max_tool_calls=most)

    return segment


def _completion(
    gateway: Services,
    model: ServedModel,
    episode: OpenEpisode,
    call_id: str,
    prompt: Prompt,
    details: TurnDetails,
    segment: Segment,
    headers: Mapping[str, str],
) -> Completion:
    pool, limits = model.pool, gateway.settings.calls
    version = episode.version if model.name == episode.model else 0
    call = Call(
        *(call_id, prompt.ids, details.used),
        episode_id=episode.id,
        min_version=version,
        images=prompt.images,
    )
    now = asyncio.get_running_loop().time()
    interval = pool.pace.interval(now) if details.stream else WHOLE_INTERVAL
    facts = partial(traced.asked, call, details, model.name)
    trace = gateway.tracing.call(traced.name_of(details.api, model.name), headers, details.received_at, facts)
    return Completion(
        CallRunner(
            *(call, pool),
            interval=interval,
            max_failures=limits.max_failures,
            trace=trace,
            load_image=partial(load_image, gateway),
        ),
        prompt,
        details,
        segment,
        recorder=model.recorder,
        metrics=gateway.metrics,
        tool_alarm=gateway.tool_alarm,
        grace_s=limits.grace_s,
    )
