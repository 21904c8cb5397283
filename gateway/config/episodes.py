"""Episodes, from the first call to the trained batch: `[episodes]`, `[calls]`, `[rewards]`, `[graders]`, `[staleness]`,
`[feed]`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headgate.configuration import Seconds, Section


class EpisodeSettings(Section):
    """`[episodes]`: deadlines after which the gateway ends an episode."""

    idle_s: Seconds = 300.0
    """Seconds without a call after which an episode is over."""
    total_s: Seconds | None = None
    """Seconds after which an episode is over, whatever it does. By default ten times as long as episodes of its group and its
    model usually take, at least 10 minutes; an hour while none has ended. Set it for agents that rightly take longer."""


class CallSettings(Section):
    """`[calls]`: calls whose client disconnects or whose engine dies."""

    grace_s: Seconds = 30.0
    """Seconds in which a retry can resume a call whose client disconnected. Then its tokens become an abandoned branch."""


class RewardSettings(Section):
    """`[rewards]`: the range of valid rewards. They hold for what is posted on an episode and on its calls, for the
    responses of graders, and for their sums: a single absurd number would make NaN of the weights."""

    min: float = Field(-1e6, ge=-1e9, le=1e9, allow_inf_nan=False)
    """The least reward."""
    max: float = Field(1e6, ge=-1e9, le=1e9, allow_inf_nan=False)
    """The greatest reward."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min >= self.max:
            raise ValueError("min must be less than max")
        return self

    def refusal(self, reward: float) -> str:
        """Return the reason why a reward is refused; empty if it is within the bounds."""
        if self.min <= reward <= self.max:
            return ""
        return f"the reward {reward:g} is not allowed: [rewards] allows {self.min:g} to {self.max:g}"


class GraderSettings(Section):
    """`[graders.NAME]`: computes a reward when an episode is closed without one."""

    function: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """`module:function`, run in a worker process; it receives the episode as a dict and returns a number."""
    url: str | None = Field(None, pattern="^https?://")
    """Or a URL: the episode is posted there as JSON, and the reply is `{"reward": number}`."""
    judge: str | None = None
    """Or a frozen model of this gateway: it scores the last reply by `criteria`, or compares it with a reference
    text. Its calls are in evaluation episodes of their own; a text that was judged before is not judged again."""
    criteria: dict[str, str] = Field(default_factory=dict, max_length=32)
    """The criteria of a score, in words, by name; in a comparison, the reasons for which one reply is better."""
    reference_key: str = ""
    """The key of the episode's metadata that has the text to compare with."""
    each_turn: bool = False
    """Score every turn by `criteria`, not only the last one; each call's part is the reward of that call."""
    next_turn: bool = False
    """Show the judge what followed the reply: the user's next message, or the results of tools. A turn that nothing followed is
    not scored, and an episode without any other is not trained (`not_judged`)."""
    max_tokens: int = Field(1024, ge=1, le=2**20)
    """Tokens of a judge's reply."""
    weight: float = Field(1.0, ge=-1e6, le=1e6, allow_inf_nan=False)
    """The weight of its reward in the sum."""
    timeout_s: Seconds = 60.0
    """Seconds that one attempt may take; a worker that takes longer is killed."""
    retries: int = Field(2, ge=0, le=100)
    """Further attempts, after which the episode is dropped with the reason `grading_failed`."""
    workers: int = Field(2, ge=1, le=256)
    """The number of worker processes, or of concurrent requests."""
    models: tuple[str, ...] | None = None
    """The trained models whose episodes it grades; all, if none are named."""

    @property
    def form(self) -> Literal["function", "url", "rubric", "pairwise"]:
        """The kind of grader that it is."""
        if self.judge is not None:
            return "pairwise" if self.reference_key else "rubric"
        return "url" if self.function is None else "function"

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.judge)) != 1:
            raise ValueError("a grader needs one of `function`, `url` and `judge`")
        if self.judge is None and (self.criteria or self.reference_key or self.each_turn or self.next_turn):
            raise ValueError("`criteria`, `reference_key`, `each_turn` and `next_turn` are for a `judge`")
        if self.judge is not None and not (self.criteria or self.reference_key):
            raise ValueError(
                "a `judge` needs `criteria` to score by, or a `reference_key` of the text to compare with"
            )
        if (self.each_turn or self.next_turn) and self.reference_key:
            raise ValueError(
                "`each_turn` and `next_turn` are for `criteria`, not for a comparison by `reference_key`"
            )
        return self


class StalenessSettings(Section):
    """`[staleness]`: how many versions samples may be older than the weights that are trained."""

    eta: int = Field(1, ge=0, le=64)
    """Versions that a sample may be older than the weights that are trained on it; 0: none."""
    batch: int = Field(16, ge=1, le=65_536)
    """Groups in one batch."""
    min_members: int = Field(2, ge=1, le=1024)
    """A group with fewer rewarded episodes is dropped."""
    spare_groups: int = Field(0, ge=0, le=65_536)
    """Groups that may run for a batch in addition to those it is trained on; the unfinished ones are aborted."""
    spare_members: int = Field(0, ge=0, le=1024)
    """Members that may run for a group in addition to its `group_size`; the unfinished ones are aborted."""
    drop_equal: bool = False
    """A group whose rewards are all equal teaches nothing and is dropped, so that another can take its place."""
    late_groups: Literal["cancel", "drop", "mask", "overtake"] = "cancel"
    """What happens to a group that misses its last batch within the bound. `cancel`: its episodes are stopped. `drop`: they
    run on, untrained. `mask`: it takes the next free batch; its rewards count, and only tokens beyond the bound are not trained.
    `overtake`: as `mask`, and no batch waits for a long group: the groups that finish first are trained first."""
    on_stuck: Literal["wait", "retry", "truncate"] = "wait"
    """What happens to a batch that lacks at most `stuck_groups` groups, all of them running for `stuck_s`. `wait`: it waits.
    `retry`: these groups are given up, so that others may start. `truncate`: the batch is trained without them."""
    stuck_groups: int = Field(4, ge=1, le=65_536)
    """Groups that a batch may lack for `on_stuck` to act."""
    stuck_s: Seconds = 60.0
    """Seconds that those groups must have been running."""

    @model_validator(mode="after")
    def _all_race_if_they_overtake(self) -> Self:
        if self.late_groups == "overtake" and self.spare_groups:
            raise ValueError(
                "spare_groups must be 0 with late_groups = 'overtake', under which all groups race for the next batch"
            )
        return self


class FeedSettings(Section):
    """`[feed]`: leases."""

    lease_s: Seconds = 120.0
    """Seconds without a renewal after which a trainer's batch may be leased to another consumer."""
