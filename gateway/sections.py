"""The tables of the gateway's configuration file, every key typed and bounded, unknown keys refused (`settings.py`)."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

RuleName = Literal["staleflow", "synchronous", "one_step", "verl", "areal", "roll", "slime"]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Days = Annotated[float, Field(gt=0, le=36_500)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class Section(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ServerSettings(Section):
    """`[server]`: where the gateway listens."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    public_url: str | None = None
    """The root by which agents reach the gateway, if not `http://host:port`."""
    body_limit_bytes: int = Field(8 * 2**20, ge=1024, le=2**30)
    keep_alive_s: Seconds = 15.0
    """How often a stream that has nothing to say sends an SSE comment."""
    shutdown_s: Seconds = 10.0
    """How long running calls may go on after a stop was asked for."""

    @property
    def url(self) -> str:
        """The root URL that agents are given."""
        return self.public_url or f"http://{self.host}:{self.port}"


class AdminSettings(Section):
    """`[admin]`: who may open episodes and publish weights."""

    key: SecretStr | None = Field(None, min_length=1)
    """Without a key the admin API answers only while the gateway listens on loopback addresses."""
    port: int | None = Field(None, ge=1, le=65_535)
    """A port of its own: then the admin API and `/metrics` are served there alone, beside `/healthz` and `/readyz`."""
    host: str | None = None
    """Where that port listens; `[server] host`, if it is not given."""

    @model_validator(mode="after")
    def _host_has_port(self) -> Self:
        if self.host is not None and self.port is None:
            raise ValueError("`host` is for the admin API's own `port`, and nothing without one")
        return self


class ProjectSettings(Section):
    """`[projects.NAME]`: a tenant, which is a set of models and an admin key that reaches nothing else (docs/security.md)."""

    key: SecretStr = Field(min_length=16)
    """Or `HEADGATE_PROJECT_KEY_NAME` in the environment: the name in capitals, `_` for `-`."""
    models: tuple[str, ...] = Field(min_length=1)
    """A trained model is in one project at most."""
    weights: Path | None = None
    """The folder in which the versions are that this key may publish; without one it may publish none."""


class LimitSettings(Section):
    """`[limits.episode]`, `[limits.agent]`: what one key may have at once; what is not given is not limited."""

    calls: int | None = Field(None, ge=1, le=1_000_000)
    """Calls that are being answered."""
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    """Of prompts and replies together. A key that has used up its minute is refused until there is something left again."""


class ProjectLimitSettings(LimitSettings):
    """`[limits.project]`: what all keys of a project may have together."""

    episodes: int | None = Field(None, ge=1, le=10_000_000)
    """Open episodes, however they were opened."""
    engines: int = Field(8, ge=0, le=256)
    """Of one model; the project's key may add engines up to this number."""


class LimitsSettings(Section):
    """`[limits]`: beyond them calls are refused with 429 before anything is rendered. Each gateway process counts for itself."""

    episode: LimitSettings = LimitSettings()
    agent: LimitSettings = LimitSettings()
    project: ProjectLimitSettings = ProjectLimitSettings()


class EngineSettings(Section):
    """`[engine]`, or `[models.NAME.engine]`: the servers that turn token ids into token ids."""

    launch: Literal["vllm", "fake", "external"] = "vllm"
    """`vllm` and `fake` are started and restarted as child processes; `external` is there already, at `url`."""
    count: int = Field(1, ge=0, le=256)
    """Engines to start; more can be added and removed at /admin/v1/engines."""
    url: str | None = None
    urls: tuple[str, ...] = ()
    """Instead of `url`: several external engines."""
    api: Literal["vllm", "sglang"] = "vllm"
    """What an external or fake engine speaks."""
    allow_public: bool = False
    """True: external engines may have public addresses. Whoever reaches one controls it: vLLM asks for its API key under /v1
    alone, and not where it is paused, given weights or asked for tokens."""
    python: str = "python"
    """The interpreter of vLLM's environment."""
    args: tuple[str, ...] = Field((), repr=False)
    """Further arguments for the engine's command line."""
    env: dict[str, str] = Field({}, repr=False)
    log: Path = Path("runs/engine.log")
    """Each engine's name is put before the suffix: `runs/engine-NAME-0.log`."""
    sleep: Literal["pause", "level1", "level2"] = "pause"
    """What an engine does on a node that its trainer has: `pause` keeps its memory (all that there is without an accelerator);
    `level1` moves its weights to the host's memory and frees the rest; `level2` frees everything."""
    start_s: Seconds = 180.0
    stall_s: Seconds = 60.0
    """How long an open engine may stay silent in the middle of a generation before the call goes on elsewhere."""
    health_s: Seconds = 2.0
    """How often engines are asked whether they are well; three times no answer is a death."""
    max_restarts: int = Field(3, ge=0, le=100)
    """Restarts within `restart_window_s` after which an engine is left alone, until the next version is published."""
    restart_window_s: Seconds = 600.0

    @model_validator(mode="after")
    def _external_has_url(self) -> Self:
        if (self.launch == "external") != (self.url is not None or bool(self.urls)):
            raise ValueError("`url` (or `urls`) is for launch = 'external', and needed there")
        if self.url is not None and self.urls:
            raise ValueError("`url`, or `urls`: one of the two")
        if self.restart_window_s < self.max_restarts * self.start_s:
            raise ValueError(
                "restart_window_s must hold max_restarts starts of start_s, or the budget would never run out"
            )
        if self.launch == "external" and self.count > 1:
            raise ValueError("external engines are counted by their `urls`; add others at /admin/v1/engines")
        for url in (self.url, *self.urls):
            if url is not None and not self.allow_public and is_public(urlsplit(url).hostname or ""):
                raise ValueError(public_engine(url))
        return self

    @property
    def places(self) -> tuple[str | None, ...]:
        """One for each engine at the start: where it is, or None if it is to be started."""
        if self.launch == "external":
            return self.urls or (self.url,)
        return (None,) * self.count


class UpstreamSettings(Section):
    """`[models.NAME.upstream]`: somebody else's OpenAI-compatible API. Its calls are recorded and never trained."""

    url: str = Field(pattern="^https?://")
    """With the `/v1`."""
    model: str | None = None
    """The model's name there, if it is another."""
    key: SecretStr | None = None
    timeout_s: Seconds = 600.0
    """How long it may be silent."""


class Bounds(Section):
    """What a training episode may ask for; the value is clamped, and both values are stored."""

    override: float | None = Field(None, ge=0, le=10)
    min: float = Field(0.0, ge=0, le=10)
    max: float = Field(10.0, ge=0, le=10)

    def apply(self, asked: float) -> float:
        """The value to use for one that was asked for."""
        return self.override if self.override is not None else min(max(asked, self.min), self.max)


class SamplingSettings(Section):
    """`[sampling]`: what happens to agents' sampling parameters in training episodes (never in eval episodes)."""

    temperature: Bounds = Bounds()
    top_p: Bounds = Bounds(max=1.0)
    seed: Literal["keep", "ignore"] = "keep"
    default_temperature: float = Field(1.0, ge=0, le=2)
    """For requests that name none."""


class StalenessSettings(Section):
    """`[staleness]`: how far samples may lag behind the weights that are trained."""

    eta: int = Field(1, ge=0, le=64)
    batch: int = Field(16, ge=1, le=65_536)
    """Groups in one batch."""
    min_members: int = Field(2, ge=1, le=1024)
    """A group with fewer rewarded episodes is dropped."""
    rule: RuleName = "staleflow"
    """Who decides. All but `staleflow` are there for comparison: they bound less, or wait more."""
    spare_groups: int = Field(0, ge=0, le=65_536)
    """Groups that may race for a batch beyond those it is trained on; what is left of them is aborted."""
    spare_members: int = Field(0, ge=0, le=1024)
    """Members that may race for a group beyond its `group_size`; what is left of them is aborted."""
    drop_equal: bool = False
    """A group whose rewards are all equal teaches nothing and is dropped, so that another can take its place."""
    late: Literal["cancel", "drop", "mask"] = "cancel"
    """A group for which no batch is left within the bound: its episodes are stopped (`cancel`); run on, untrained (`drop`); or it
    takes the next batch that there is, its rewards count, and only tokens past the bound are not trained (`mask`)."""
    stuck: Literal["wait", "retry", "truncate"] = "wait"
    """A batch that lacks at most `stuck_groups` groups, all of them running for `stuck_s`: wait for them; give them up, so that
    others may start (`retry`); or train without them (`truncate`)."""
    stuck_groups: int = Field(4, ge=1, le=65_536)
    stuck_s: Seconds = 60.0

    @model_validator(mode="after")
    def _rule_takes_the_settings(self) -> Self:
        if self.rule == "slime" and self.eta == 0:
            raise ValueError('rule = "slime" needs eta >= 1: it is its update_weights_interval')
        extras = (self.spare_groups, self.spare_members, self.drop_equal, self.stuck != "wait")
        if self.rule != "staleflow" and (any(extras) or self.late != "cancel"):
            raise ValueError(
                f'spare_groups, spare_members, drop_equal, late and stuck are for rule = "staleflow", not {self.rule!r}'
            )
        return self


class GraderSettings(Section):
    """`[graders.NAME]`: something that computes a reward when an episode is closed without one."""

    function: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """`module:function`, run in a worker process; it is given the episode as a dict and answers a number."""
    url: str | None = Field(None, pattern="^https?://")
    """Or a URL: the episode is posted there as JSON, and `{"reward": number}` is answered."""
    weight: float = Field(1.0, ge=-1e6, le=1e6, allow_inf_nan=False)
    """What its answer counts in the sum."""
    timeout_s: Seconds = 60.0
    """How long one try may take; a worker that takes longer is killed."""
    retries: int = Field(2, ge=0, le=100)
    """Further tries, after which the episode is dropped with the reason `grading_failed`."""
    workers: int = Field(2, ge=1, le=256)
    """Processes, or requests at once."""
    models: tuple[str, ...] | None = None
    """The trained models whose episodes it grades; all, if none are named."""

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError("a grader needs `function`, or `url`: one of the two")
        return self


class ModelSettings(Section):
    """`[models.NAME]`: a model, and the names by which agents may ask for it."""

    path: Path | None = None
    """A Hugging Face checkpoint: version 0. Needed, unless the model is upstream."""
    train: bool = True
    """False: frozen. Its calls are recorded and never trained."""
    family: str = "qwen3"
    """Which renderer turns messages into tokens and back; `auto` asks the `renderers` library."""
    aliases: tuple[str, ...] | None = None
    """Other names that mean this model; `*` is every name. Where none are given, a trained model answers to every name that
    nobody else has, in its own episodes."""
    max_model_len: int = Field(2048, ge=16, le=2**20)
    """Prompt and completion together, in tokens."""
    thinking: bool = True
    """Passed to families whose template knows `enable_thinking`."""
    engine: EngineSettings | None = None
    """Instead of `[engine]`."""
    upstream: UpstreamSettings | None = None
    staleness: StalenessSettings | None = None
    """Instead of `[staleness]`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is None) == (self.upstream is None):
            raise ValueError("a model needs `path`, or `upstream`: one of the two")
        if self.upstream is not None and self.train:
            raise ValueError("a model that is upstream cannot be trained here: say `train = false`")
        return self


class EpisodeSettings(Section):
    """`[episodes]`: when an episode that nobody ends is ended."""

    idle_s: Seconds = 300.0
    total_s: Seconds = 3600.0
    max_wait_s: Seconds = 300.0
    """The longest `?wait=` that opening an episode honours."""


class AgentSettings(Section):
    """`[agents.NAME]`: a key of an agent's own, under which episodes are opened by the calls themselves (docs/callers.md)."""

    key: SecretStr = Field(min_length=16)
    """Or `HEADGATE_AGENT_KEY_NAME` in the environment: the name in capitals, `_` for `-`."""
    model: str | None = None
    """The trained model that its episodes are about; the first, if none is named."""
    mode: Literal["eval", "train"] = "eval"
    """Of the episodes that its calls open."""
    group_size: int | None = Field(None, ge=1, le=1024)
    """For `train`, and needed there: how many episodes with the same opening messages make a group."""
    idle_s: Seconds | None = None
    """When a conversation that nobody continues is over; `[episodes] idle_s`, if it is not given."""
    max_episodes: int = Field(1024, ge=1, le=1_000_000)
    """Episodes that its calls opened, open at once; further ones are refused with 429."""
    max_wait_s: float = Field(5.0, ge=0, le=86_400)
    """How long a call of `train` waits for a slot within the staleness bound, before it is refused with 429."""

    @model_validator(mode="after")
    def _groups_are_trained(self) -> Self:
        if (self.mode == "train") != (self.group_size is not None):
            raise ValueError("`group_size` is for mode = 'train', and needed there")
        return self


class StoreSettings(Section):
    """`[store]`: where committed facts live."""

    url: str = Field("sqlite:///runs/headgate.db", repr=False)
    """It may hold a password."""
    max_pending: int = Field(10_000, ge=1)
    """Writes that may wait for the database before calls are refused with 503."""
    read_wait_s: Seconds = 10.0
    """How long a read waits for a database that is away, before it is refused with 503; and a start or a stop of the gateway."""


class RetentionSettings(Section):
    """`[retention]`: how long closed episodes are kept (docs/store.md). What is not given keeps them for ever."""

    keep_days: Days | None = None
    """Days since its end after which an episode is deleted, unless it may still be needed."""
    keep_untrained_days: Days | None = None
    """The same for training episodes that no batch was trained on, if not `keep_days`."""
    keep_eval_days: Days | None = None
    """The same for evaluation episodes, if not `keep_days`."""
    every_s: Seconds = 3600.0
    """How often it is looked for old episodes."""


class UpdateSettings(Section):
    """`[update]`: how engines come to a new version, the deadlines of the steps, and how exact the probe must be."""

    mode: Literal["abort", "keep"] = "abort"
    """`abort`: engines give their requests back, and they go on after the update, on any engine. `keep`: requests freeze in their
    engine."""
    order: Literal["rolling", "together", "pull"] = "rolling"
    """One engine after the other; all at once; or `pull`: a version is live as soon as one engine runs it, and the others come to
    it when they have little to do, or a call waits that they are too old for (`[routing]`)."""
    clear_cache: bool = True
    """False (for `keep`): frozen requests go on with what older weights computed, and their tokens are flagged STALE_KV."""
    patience_s: float = Field(0.0, ge=0, le=3600)
    """How long requests that an engine gave back for an update wait for it, before they go to another: that one would have to
    compute their prefixes, beside its own work."""
    hold_s: Seconds = 30.0
    load_s: Seconds = 120.0
    probe_s: Seconds = 60.0
    resume_s: Seconds = 30.0
    probe_tolerance: float = Field(0.15, gt=0, le=5)
    """The mean gap (nats) between an engine's log-probabilities and the manifest's that still passes."""
    noise_floor: float = Field(0.002, ge=0, le=1)
    """Two versions whose probes differ by less (mean, nats) are called indistinct."""
    orphans: Literal["drop", "correct"] = "drop"
    """What becomes of samples whose version is no ancestor of the newest: their tokens are not trained, or they are (the
    correction by importance sampling takes them for what they are: samples of another policy)."""


class CallSettings(Section):
    """`[calls]`: calls whose client or engine goes away."""

    grace_s: Seconds = 30.0
    """How long the tokens of a call whose client went away can be resumed by a retry, before they become an abandoned branch."""
    chunks_per_s: int = Field(14_000, ge=1, le=10**9)
    """Chunks a second of all streams together: where engines sample more tokens than this, several come in one chunk. What one
    core carries; fewer make first tokens come sooner under load."""
    max_failures: int = Field(5, ge=1, le=100)
    """A call that saw so many engines fail gives up: it may be what kills them."""


class QueueSettings(Section):
    """`[queue]`: calls that wait while an engine is held."""

    max_waiting: int = Field(4096, ge=1)
    max_wait_s: Seconds = 300.0


class ControlSettings(Section):
    """`[control]`: the control program, which decides when engines are launched, updated and restarted."""

    recording: Path | None = Path("runs/control.jsonl")
    """What happened and what was decided, for `scheduler replay`."""
    recording_mb: float = Field(1024.0, gt=0, le=1_000_000)
    """A run's recording ends at this size; the gateway goes on, and a replay ends there."""


class ClusterSettings(Section):
    """`[cluster]`: several gateway processes on one store, of which one at a time decides (docs/cluster.md)."""

    url: str | None = Field(None, pattern="^https?://")
    """Where the other gateway processes reach this one, without a path. Setting it (or `gateway serve --workers`) turns the
    cluster on; it needs PostgreSQL."""
    key: SecretStr | None = Field(None, min_length=16)
    """What the processes show one another. Or `HEADGATE_CLUSTER_KEY` in the environment."""
    lease_s: float = Field(5.0, ge=0.5, le=300)
    """How long the coordinator may be silent before another process takes its place."""
    ask_s: Seconds = 10.0
    """How long a process may take to do what the coordinator asks of it, before it counts as gone."""


class BusSettings(Section):
    """`[bus]`: what is hot, shared between gateway processes, and may be lost."""

    url: str = Field("memory://", pattern="^(memory|redis|rediss|unix)://", repr=False)
    """`redis://HOST:PORT/N`; `memory://` is this process alone: a call whose process dies is then begun anew by its retry."""
    prefix: str = Field("headgate", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """What the names of all keys begin with: gateways that share a server but no store need different ones."""
    timeout_s: float = Field(0.5, ge=0.01, le=10)
    """How long an operation may take before the bus counts as away."""
    alive_s: float = Field(3.0, ge=0.5, le=60)
    """How long a process that says nothing counts as alive; then others take over its running calls."""
    log_every_s: float = Field(0.025, ge=0.001, le=1)
    """How often the new tokens of all running calls are logged. A stream shows nothing that is not logged, so it comes up to
    so much later."""
    log_s: float = Field(60.0, ge=1, le=3600)
    """How long what a dead process has logged of its calls is kept for their retries."""


class LengthSettings(Section):
    """`[lengths]`: how long calls are expected to be, learnt from those that are over (docs/scheduler.md, Long tails)."""

    ranker: Literal["none", "history", "boosted"] = "none"
    """`history`: as long as the calls of the same task were. `boosted`: trees over the prompt, histories and the turn
    (extra `lengths`)."""
    tail_share: float = Field(0.2, gt=0, lt=1)
    """Which share of the calls, those that are expected to be longest, are tails."""
    memory: int = Field(10_000, ge=16, le=1_000_000)
    """Tasks (and as many groups, and episodes) whose lengths are remembered: those that were heard of last."""
    warm_calls: int = Field(2000, ge=0, le=100_000)
    """Of how many calls in the store a process learns when it starts, the newest;"""
    warm_s: float = Field(5.0, ge=0, le=600)
    """and for how long at most, for all models together."""


class RoutingSettings(Section):
    """`[routing]`: where calls go, when engines pull weights, which calls move (docs/scheduler.md, Where a call goes)."""

    rule: Literal["cached", "gain"] = "cached"
    """`cached`: where the prefix is cached, if that outweighs the load there. `gain`: where it adds most tokens a second."""
    mu: float = Field(0.05, ge=0, lt=1)
    """With `gain`: a call waits here while it would add less than this share of what it adds to an empty engine."""
    urgency: float = Field(64.0, ge=1, le=1e6)
    """With `gain`: how many times as much a call counts for each version that its V is behind the newest; 1: all the same."""
    tails: bool = False
    """Engines of their own for calls that are predicted to be among the longest."""
    slots: int = Field(64, ge=1, le=65_536)
    """Calls that run at once in an engine, as far as `tails` is concerned."""
    running_below: int = Field(2, ge=1, le=65_536)
    """With `[update] order = "pull"`: an engine with fewer calls than these is under-used, and pulls."""
    rate_below: float = Field(0.0, ge=0, le=1)
    """And so is one that samples less than this share of what engines sample on average."""
    pull_at_once: float = Field(0.25, ge=0, le=1)
    """The share of the engines that may pull together; one always may."""
    migrate: bool | None = None
    """Calls move out of engines with long queues, and from fast engines to slow ones. If it is not given: with `[update] order =
    "pull"`, where stragglers would otherwise keep an engine from ever pulling."""
    waiting_above: int = Field(2, ge=0, le=65_536)
    """So many calls may wait in an engine's own queue before some move."""
    gap_above: float = Field(2.0, ge=1, le=1000)
    """The fastest engine samples so many times more than the slowest before calls move,"""
    gap_until: float = Field(1.2, ge=1, le=1000)
    """and they move until it is below this."""
    moves_at_once: int = Field(16, ge=1, le=65_536)
    """The most calls that move in one second."""
    k1: float = Field(1e-7, ge=0, le=1)
    """What is believed of engines until it has been measured, in seconds: a step's time for each token in the cache,"""
    k2: float = Field(5e-3, ge=0, le=100)
    """for the batch at least,"""
    k3: float = Field(1e-4, ge=0, le=100)
    """for each running call,"""
    k4: float = Field(5e-3, gt=0, le=100)
    """and in any case."""

    @model_validator(mode="after")
    def _gap_closes(self) -> Self:
        if self.gap_until > self.gap_above:
            raise ValueError("gap_until must not exceed gap_above: calls would move to and fro")
        return self


class NodeSettings(Section):
    """`[nodes.NAME]`: a machine, or a part of one, and what it is for (docs/scheduler.md)."""

    tags: tuple[Name, ...] = Field(min_length=1, max_length=64)
    """`rollout`: its engines sample; `train`: a trainer works on it; both: its engines sample while the trainer waits. Any other
    tag is a description."""
    zone: str = Field("", max_length=64)
    hardware: str = Field("", max_length=64)
    capacity: dict[Name, float] = Field({}, max_length=64)
    """Such as `{ gpus = 8 }`; only shown."""
    engines: int = Field(0, ge=0, le=256)
    """To start there, as `[engine]` says; they are called NAME-0, NAME-1, ..."""
    urls: tuple[str, ...] = ()
    """Instead, engines that are there already."""
    model: str | None = None
    """Which model its engines run; the first trained one, if none is named."""

    @model_validator(mode="after")
    def _engines_can_be(self) -> Self:
        if self.engines and self.urls:
            raise ValueError("`engines` are started, `urls` are there already: one of the two")
        if (self.engines or self.urls) and "rollout" not in self.tags:
            raise ValueError("engines need the tag 'rollout': without it they would never wake")
        return self

    @property
    def places(self) -> tuple[str | None, ...]:
        """One for each engine: where it is, or None if it is to be started."""
        return self.urls or (None,) * self.engines


class LendingSettings(Section):
    """`[lending]`: nodes with the tags `rollout` and `train`, which sample while their trainer waits (docs/scheduler.md)."""

    enabled: bool = True
    """False: their engines never wake."""
    margin_s: float = Field(1.0, ge=0, le=3600)
    """By how much the predicted wait must exceed the measured cost of the switch; and how much earlier than that a node is called
    back."""
    min_stay_s: float = Field(5.0, ge=0, le=3600)
    """The shortest time for which a node is lent, unless its trainer claims it; and between a call back and the next loan."""
    deadline_s: float = Field(30.0, ge=0.2, le=3600)
    """How long a trainer waits for its node at most. An engine that does not sleep after half of it is killed."""
    claim_s: float = Field(30.0, ge=0.5, le=3600)
    """How long a trainer that has a node may say nothing before it is lent again; and how long a node is left alone at the
    gateway's start, unless its trainer speaks."""
    smooth_s: float = Field(10.0, ge=0.1, le=3600)
    """How far back the measured speed reaches by which it is predicted how long a trainer will wait."""
    lead: float = Field(1.0, ge=0, le=1)
    """How long before its batch is whole a trainer gets its node back, as a share of the time that it computes on a batch, which
    is measured. 0 for a trainer that takes no group before the batch is whole."""
    pinned_s: float | None = Field(None, ge=0, le=3600)
    """How long a call that cannot move may go on in an engine that is put to sleep; a quarter of `deadline_s`, if not given."""

    @model_validator(mode="after")
    def _pinned_calls_end_in_time(self) -> Self:
        if self.grace_s > self.deadline_s / 2:
            raise ValueError("pinned_s must be no more than half of deadline_s: then the engine is killed")
        return self

    @property
    def grace_s(self) -> float:
        """`pinned_s`, or what stands for it."""
        return self.deadline_s / 4 if self.pinned_s is None else self.pinned_s


class FeedSettings(Section):
    """`[feed]`: leases."""

    lease_s: Seconds = 120.0
    max_wait_s: Seconds = 60.0


def is_public(address: str) -> bool:
    """Whether an IP address can be reached from everywhere; False for a name."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_global


def public_engine(url: str) -> str:
    """Why an engine is refused at a public address."""
    return (
        f"{url.rpartition('@')[2]}: an engine at a public address can be paused, reloaded and read by anybody, because vLLM's "
        "control endpoints ignore its API key; put it on loopback or a private network, or say `allow_public = true`"
    )
