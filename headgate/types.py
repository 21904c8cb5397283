"""The gateway's vocabulary. Everything here is a value: no I/O, no behavior beyond construction.

Token trees travel to a trainer in the form of `headgate/arrow.py`.

Invariants of a token tree (`Node`):
- nodes are numbered in creation order, so a parent always comes before its children;
- a node hangs at the first `at` tokens of its parent (`parent == -1`: at the root), which is how branches share a prefix
  without anything being split or stored twice;
- in a sampled node every token has the log-probability and the version with which it was sampled; a prompt node has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.kept import Kept
from headgate.routes import PackedRoutes

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

EpisodeMode = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]

UNUSABLE_LOGPROB = -9000.0
"""vLLM writes -9999 where it has no log-probability: nothing at or below this is one."""


CRASHED_ATTEMPT = "crashed_attempt"
"""The `mask_reason` of turns whose agent crashed and was started again in the same episode."""
NO_CALLS = "no_calls"
"""The end reason of an episode whose agent was rewarded although it sampled nothing."""
ABANDONED = "abandoned"
"""The `mask_reason`, and the finish reason, of turns whose client went away for good."""
DELETED = "deleted"
"""The `mask_reason` of all nodes of an episode whose contents were deleted; also its notice, and the reason of an open one."""
REDACTED = "redacted"
"""The `mask_reason` of turns with a secret in the prompt or the reply, and of prompt nodes with one (`[redaction]`)."""


class TokenFlag(IntFlag):
    """Flags of one sampled token; a flagged token was not drawn from the policy's own distribution."""

    NONE = 0
    CONSTRAINED = 1
    """A grammar, a forced tool, a bias or a penalty shaped the choice."""
    TRUNCATED = 2
    """top-p, top-k or min-p cut the distribution, and what they kept is not recorded (`Node.kept`)."""
    GREEDY = 4
    """Temperature 0: the token was not drawn at all."""
    UNROUTED = 8
    """The experts behind its prediction were not recorded, and the trainer masks such tokens (`[model] missing_routes`)."""
    INVALID_LOGPROB = 16
    """The engine gave no usable log-probability (its NaN sentinel)."""
    UNCONFIRMED = 32
    """Two versions may have sampled it: the engine died before it reported which."""
    ORPHANED = 64
    """Its version is not an ancestor of the newest: the trainer went back to an older checkpoint."""
    LATE = 128
    """The token is older than the bound allows in its batch (`[staleness] late_groups = "mask"` or `"overtake"`)."""


class ImageSpan(NamedTuple):
    """An image among tokens: those from `offset` on, `length` of them, stand for it."""

    hash: str
    """SHA-256 of the image's file, in hexadecimal digits."""
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens of one episode: a piece of a prompt, or one turn that the model sampled."""

    index: int
    parent: int
    at: int
    sampled: bool
    ids: Int32Array
    logprobs: Float32Array
    """Shape (n,) in nats under the sampling distribution; shape (0,) for a prompt node."""
    versions: Int32Array
    """Shape (n,): the version that sampled each token, the oldest possible one where it is UNCONFIRMED; shape (0,) for a
    prompt node."""
    flags: UInt8Array
    """Shape (n,): `TokenFlag` bits; shape (0,) for a prompt node."""
    temperature: float = 1.0
    """The temperature that was used, by which a trainer scales logits before it compares log-probabilities."""
    mask_reason: str = ""
    """The reason why no token of this node may be trained; empty if they may."""
    call_id: str = ""
    reward: float | None = None
    """Posted on this turn, in addition to the episode's own."""
    finish_reason: str = ""
    """The reason why the turn ended: `stop`, `tool_calls`, `length` (cut at its token limit) or `abandoned`; empty for a prompt
    node, and in a feed or an export of a gateway that did not send it."""
    newest: Int32Array | None = None
    """Shape (n,): the newest version that can have sampled each token; None: `versions` is exact. It does not travel."""
    teacher: Float32Array | None = None
    """Shape (n,): a teacher's log-probability of each token of a sampled node, in nats; NaN where it gave none. The trainer asks
    for it (`[distill]`), so it does not travel."""
    images: tuple[ImageSpan, ...] = ()
    """The images among the node's own tokens; a sampled node has none."""
    routes: PackedRoutes | None = None
    """The experts that each of the node's tokens went through (`headgate/routes.py`); None: they are not known."""
    kept: Kept | None = None
    """What top-p, top-k or min-p left to choose from for each token of a sampled node; None: it is known of no token."""

    def without_kept(self) -> Node:
        """Return the node for readers that do not normalize over `kept`: such tokens are TRUNCATED."""
        if self.kept is None:
            return self
        return replace(self, flags=self.flags | np.uint8(TokenFlag.TRUNCATED) * self.kept.known, kept=None)


@dataclass(frozen=True, slots=True)
class Episode:
    """One run of an agent on a task, as the trainer sees it."""

    episode_id: str
    reward: float
    """The reward, with those posted on its turns."""
    nodes: tuple[Node, ...]
    context_full: bool = False
    """True if the episode's last call was refused because its conversation filled the model's context."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward, by the names that the agent reported or of the graders."""


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes sampled for one task: the unit of staleness and of leasing."""

    group_id: str
    task_id: str
    version: int
    """The version at which the group's slot was reserved: no token of it was sampled by an older one."""
    episodes: tuple[Episode, ...]
    batch: int = -1
    """The batch that the group is in; -1: none yet."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to train on one batch. `fence` grows with every lease: a response with an older one is refused."""

    lease_id: str
    batch: int
    size: int
    """Groups that make the batch whole."""
    fence: int
    deadline_s: float
    """Seconds from the response until the lease ends unless it is renewed."""


@dataclass(frozen=True, slots=True)
class LeasedGroups:
    """Groups of a leased batch from a cursor on. `complete` means that no more will follow."""

    groups: tuple[Group, ...]
    cursor: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Probe:
    """Token sequences on which version N and its parent differ most, with each one's log-probabilities.

    The gateway asks an engine for its own log-probabilities of the same tokens and so learns which version it runs.
    """

    sequences: tuple[tuple[int, ...], ...]
    new_logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities (nats, temperature 1) of every token but the first of each sequence, under version N."""
    parent_logprobs: tuple[tuple[float, ...], ...]
    """The same under the parent; empty for the first version."""
    noise: float = 0.0
    """The mean gap (nats) between two of the trainer's own passes of the same tokens under version N, batched otherwise."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with lists in place of tuples."""
        return {
            "sequences": [list(s) for s in self.sequences],
            "new_logprobs": [list(s) for s in self.new_logprobs],
            "parent_logprobs": [list(s) for s in self.parent_logprobs],
            "noise": self.noise,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Probe:
        """Raise KeyError, TypeError or ValueError if `value` is not a probe, or has nothing to compare."""
        probe = cls(
            tuple(tuple(int(t) for t in s) for s in value["sequences"]),
            tuple(tuple(float(x) for x in s) for s in value["new_logprobs"]),
            tuple(tuple(float(x) for x in s) for s in value["parent_logprobs"]),
            float(value.get("noise", 0.0)),
        )
        if not probe.sequences or min(map(len, probe.sequences)) < 2:
            raise ValueError("a probe needs at least one sequence, and two tokens in each")
        for logprobs in (probe.new_logprobs, probe.parent_logprobs or probe.new_logprobs):
            if [len(s) + 1 for s in logprobs] != [len(s) for s in probe.sequences]:
                raise ValueError("a probe needs one log-probability for each token but the first")
            if not all(math.isfinite(x) for row in logprobs for x in row):
                raise ValueError("a probe's log-probabilities must be finite")
        if not (math.isfinite(probe.noise) and probe.noise >= 0):
            raise ValueError("a probe's noise must be a number of nats, 0 or more")
        return probe


@dataclass(frozen=True, slots=True)
class EpisodeSampling:
    """Sampling parameters of an evaluation episode, in place of those that its agent requests."""

    temperature: float | None = None
    """None: as requested. 0 is greedy."""
    top_p: float | None = None
    seed: Literal["keep", "ignore"] = "keep"
    """`ignore`: a seed that the agent names, with which several episodes of a task would all be the same."""

    def stored(self) -> dict[str, Any] | None:
        """Return the fields that are set; None if none is."""
        values = {"temperature": self.temperature, "top_p": self.top_p}
        found: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return found | ({"seed": self.seed} if self.seed != "keep" else {}) or None


AS_REQUESTED = EpisodeSampling()
"""Leaves all sampling parameters to the agent."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A request to open an episode."""

    task_id: str
    group_id: str | None
    """None: a group of its own, with a new name."""
    group_size: int
    mode: EpisodeMode
    model: str
    """A trained one."""
    details: Mapping[str, Any] = field(default_factory=dict)
    agent: str = ""
    """The agent whose key reaches it, in addition to its own."""
    opening: str = ""
    """The name of the request that opens it, under the agent's key; then it has no key of its own."""
    notice: str = ""
    """A notice for `why` about how the episode was opened (`gateway/observe/explain.py`)."""
    sampling: EpisodeSampling = AS_REQUESTED


@dataclass(frozen=True, slots=True)
class EpisodeOpened:
    """The opened episode: `api_key` and `base_url` for the agent, `episode_id` for its driver."""

    episode_id: str
    api_key: str
    base_url: str
    version: int


@dataclass(frozen=True, slots=True)
class Grammar:
    """The constraint on a reply's tokens."""

    kind: Literal["json", "regex", "ebnf", "structural_tag"]
    value: str
    """A JSON schema, a regular expression, an EBNF grammar or a structural tag (xgrammar's form), as text."""
    param: str = field(default="", compare=False)
    """The field of the request that has it."""


LEAST_TEMPERATURE = 1e-6
"""The least temperature above 0 at which an engine samples (SGLang's; vLLM's is 0.01). No tokens of a lower one are trained."""


@dataclass(slots=True)
class Sampling:
    """Sampling parameters as an engine takes them. `max_tokens` counts what is still to be sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    top_logprobs: int = 0
    """The number of alternatives to each token; they are delivered, not recorded."""
    grammar: Grammar | None = None

    @property
    def pinned(self) -> str:
        """The state of the sampler that no other engine, and no second request, can take over; empty if there is none."""
        if self.grammar is not None:
            return "a grammar"
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0:
            return "penalties"
        if self.min_tokens:
            return "min_tokens"
        return "a seed" if self.seed is not None and self.temperature > 0 else ""

    def flags(self) -> TokenFlag:
        """Return the flags that these parameters put on every token that they sample."""
        flags = TokenFlag.NONE
        if self.temperature == 0.0:
            flags |= TokenFlag.GREEDY
        if self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0:
            flags |= TokenFlag.TRUNCATED
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        if self.grammar is not None or self.logit_bias or self.min_tokens or penalties:
            flags |= TokenFlag.CONSTRAINED
        return flags
