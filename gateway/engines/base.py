"""The interface to inference engines. An engine knows token ids, log-probabilities and one set of weights.

Invariants that an adapter keeps:
- `generate` yields every sampled token once, in order, and ends with exactly one chunk that has a finish reason;
- closing the iterator stops the engine's work on the request;
- after `pause` has returned, no token is sampled until `resume`. With `keep` the open requests stay in the engine and continue at
  `resume`, under the weights that are loaded by then; without it each of them ends with `abort`;
- between `sleep` and `wake` the engine samples nothing; after `wake` it is paused, and has weights only once they are loaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headgate.errors import EngineRefused
from headgate.types import FinishReason, ImageSpan, Int32Array, Sampling
from scheduler.policies.proof import Holding

Level = Literal[1, 2]
"""The depth of sleep: 1 keeps the weights in the host's memory, 2 forgets them."""


LoadImage = Callable[[str], Awaitable[tuple[str, bytes]]]
"""Finds the media type and the file of an image by its hash."""


async def no_images(name: str) -> tuple[str, bytes]:
    """Find none."""
    raise EngineRefused(f"the image {name} is not stored here")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to an engine."""

    request_id: str
    prompt: Sequence[int] | Int32Array
    sampling: Sampling
    interval: int = 1
    """The most tokens of one chunk: larger chunks cost less, smaller ones arrive sooner."""
    cache_salt: str = ""
    """Prefix caches are shared between requests of equal salt only."""
    label: str = ""
    """The label that the engine must have, where others may restart it (EngineReplaced); empty if only this process does."""
    adapter: str = ""
    """The adapter that samples the request to its end (`load_adapter`); empty: the engine's own weights."""
    images: tuple[ImageSpan, ...] = ()
    """The images among the prompt's tokens, in their order."""
    load_image: LoadImage = no_images
    routes_from: int | None = None
    """The first position of which the experts are to be reported, with the last chunk; None: of none."""


class TokenChunk(NamedTuple):
    """Tokens as they were sampled, each with its log-probability in nats."""

    ids: list[int]
    logprobs: list[float]
    finish: FinishReason | None = None
    labels: tuple[tuple[str, int], ...] | None = None
    """The numbers of tokens sampled under each label, in order; in the last chunk. None: the engine does not report them."""
    top: list[list[tuple[int, float]]] | None = None
    """The likeliest ids of each token and their log-probabilities, if requested with `top_logprobs`."""
    routes: npt.NDArray[np.integer[Any]] | None = None
    """The experts of each position from `routes_from` up to the last token but one, as the engine reports them: of shape
    [positions, layers, top_k]; in the last chunk. None: the engine does not report them."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """An engine's counts of its own steps, since its start."""

    steps: int
    prompts: int
    """Tokens of prompts that it computed; those that it had in its cache are not among them."""
    gaps: int
    """Pairs of tokens that a request sampled one after the other."""
    gaps_s: float
    """Seconds between the two, summed over all pairs."""


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's own report of its load."""

    running: int
    """Requests that it samples."""
    waiting: int
    """Requests in its own queue."""
    kv: int
    """Tokens in its cache that belong to requests; a prefix that several share counts once."""
    sampled: int
    """Tokens since its start, of all requests."""
    counts: StepCounts | None = None
    """None: it does not count its steps."""


class Engine(Protocol):
    """Every method raises EngineUnreachable when the engine is not there, and EngineError when it refuses."""

    name: str

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample tokens for a request."""
        ...

    async def pause(self, *, keep: bool = False) -> None:
        """Stop sampling and drop every cached prefix. Running requests are given back; with `keep` they are frozen, and compute
        their prefixes again. A second pause gives back what arrived since the first."""
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Give requests back, paused or not; ids that do not run are ignored."""
        ...

    async def load(self, path: str) -> None:
        """Load the checkpoint in `path` in place of the present weights. Only while paused."""
        ...

    async def workers(self) -> int:
        """How many processes hold the weights, each of which receives them (`receive`)."""
        ...

    async def devices(self) -> list[dict[str, str]]:
        """Return the accelerator and shared memory of each worker (`headgate_transfer.devices`); empty if they are not known."""
        ...

    async def receive(self, join: dict[str, Any]) -> None:
        """Begin to receive a version from a group of processes (`headgate_transfer.wire.Join`) while sampling; return
        immediately. A version that was received before and not loaded is dropped."""
        ...

    async def receive_weights(self, version: int, timeout_s: float) -> None:
        """Put the version that was received in place of the present weights. Only while paused. If it did not come whole, the
        weights are as before."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in `path` under a name, in addition to others, while calls run; do nothing if it is loaded already.

        A name stands for the same bytes for ever."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Give no new request the adapter of a name; one that is not there is no error."""
        ...

    async def forget_adapters(self) -> None:
        """Take every adapter out of the engine, so that its own weights sample alone. Only while no request is inside."""
        ...

    async def label(self, version: int) -> None:
        """Set the label that the engine puts on what it samples from now on."""
        ...

    async def returns_routes(self) -> bool:
        """Return true if the engine reports the experts of tokens (`routes_from`)."""
        ...

    async def frees_memory(self) -> bool:
        """Return true if `sleep` frees memory: the engine has an accelerator, and was started to sleep."""
        ...

    async def sleep(self, level: Level) -> None:
        """Free the accelerator's memory, where the engine has an accelerator. Only while paused without any request inside."""
        ...

    async def wake(self) -> None:
        """Take its memory again; then the weights are to be loaded. An engine that is awake is only paused."""
        ...

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        """Return the log-probability of every token of `ids` but the first, at temperature 1, by the present weights, or an
        adapter."""
        ...

    async def prove(self, version: int, path: str, adapter: str = "") -> list[Holding]:
        """Compare what each worker holds with a version's tensors: those that it received, else those of the files in `path`.

        `adapter`: the version is an adapter of this name, and not the engine's own weights. Raise NotComparable where the engine
        has no means to compare."""
        ...

    async def read_load(self) -> Load | None:
        """Return the engine's load; None if it does not report one."""
        ...

    async def healthy(self) -> bool:
        """Return true if the engine responds."""
        ...

    async def close(self) -> None:
        """Close connections; the engine itself keeps running."""
        ...
