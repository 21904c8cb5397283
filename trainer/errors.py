"""All conditions under which the trainer stops. The root is `TrainerError`; the command line prints it without a trace.

TrainerError
|- ConfigError          a settings file or recipe that cannot be used
|- CheckpointError      a checkpoint that is missing, cannot be read or written, or is of another model
|  `- CheckpointDamaged  some of its bytes differ from those that were written
|- GatewayAhead         the gateway knows weights newer than the newest checkpoint
|- GatewayUnreachable   the gateway does not respond, or another one listens at its address
|- LeaseLost            the gateway no longer grants the lease that is being trained
|- FeedBroken           the gateway sent a group twice, or a batch that can no longer be trained
|- RankLost             another process of the run ended, or did not respond in time
|- OffloadFailed        weights and moments could not leave the device or return to it
|- NotFinite            too many steps in a row had a loss or gradient that is not finite
|- TooManyFailed      too many episodes failed
|- PublishFailed        the engines did not load the published version
|  `- VersionRejected   and never will: its weights are bad
`- StepTimeout          a step of the loop missed its deadline; the message names the step
"""

from __future__ import annotations


class TrainerError(Exception):
    """The root of the trainer's errors."""

    lasts = False
    """True if the next start would end in the same way: the exit status is 2, and no supervisor starts the trainer again."""


class ConfigError(TrainerError):
    """A settings file that cannot be used; the message names the file and every wrong key."""

    lasts = True


class CheckpointError(TrainerError):
    """A checkpoint that is missing, cannot be read or written, or is of another model."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint that has other bytes than were written; an older one may be whole."""


class GatewayAhead(TrainerError):
    """The gateway knows weights newer than the newest checkpoint, so training on would reuse version numbers."""

    lasts = True


class GatewayUnreachable(TrainerError):
    """The gateway does not respond, or another one listens where it should be started."""


class LeaseLost(TrainerError):
    """The gateway no longer grants the lease that is being trained."""


class FeedBroken(TrainerError):
    """The gateway sent a group of the leased batch twice, or a batch that can no longer be trained."""


class RankLost(TrainerError):
    """Another process of the run ended, or did not respond in time; the message names the step."""


class OffloadFailed(TrainerError):
    """Weights and moments could not leave their device while its node is lent, or could not return."""


class NotFinite(TrainerError):
    """Too many steps in a row were skipped, because their loss or gradient was not finite."""


class TooManyFailed(TrainerError):
    """Too many episodes failed: what is left is not a fair sample of the tasks. `reason`: why most of them failed."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class PublishFailed(TrainerError):
    """The engines did not load the published version."""


class VersionRejected(PublishFailed):
    """The gateway refuses a version's weights permanently: its tensors are wrong, or an engine failed with them.

    `lasts`: its checkpoint has the same weights, or the version before it was refused too.
    """

    def __init__(self, message: str, *, lasts: bool = False) -> None:
        super().__init__(message)
        self.lasts = lasts


class StepTimeout(TrainerError):
    """A step of the loop missed its deadline."""

    def __init__(self, step: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"step '{step}' missed its deadline of {seconds:g} s{detail and ': '}{detail}")
        self.step = step
