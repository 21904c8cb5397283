"""`[distill]`: a frozen teacher scores the tokens that the trained model sampled (on-policy distillation)."""

from __future__ import annotations

from pydantic import Field, SecretStr

from headgate.configuration import Seconds, Section


class DistillSettings(Section):
    """`[distill]`: learn from a teacher's log-probabilities of the sampled tokens, with rewards or in place of them."""

    url: str = Field(pattern=r"^https?://")
    """The teacher's base URL: vLLM's, such as `http://127.0.0.1:8001/v1`. It needs the trained model's tokenizer."""
    model: str
    """The teacher's name at that server."""
    key: SecretStr | None = None
    """The server's key. Or `HEADGATE_TEACHER_KEY` in the environment."""
    weight: float = Field(1.0, gt=0, le=1000)
    """A token's advantage is this times (teacher's - recorded log-probability), plus that from rewards."""
    reward_weight: float = Field(1.0, ge=0, le=1000)
    """Of the advantages from rewards; 0 learns from the teacher alone."""
    cap: float = Field(10.0, gt=0)
    """The largest absolute difference of a token's log-probabilities, in nats; `inf` cuts none."""
    concurrency: int = Field(16, ge=1, le=4096)
    """Requests to the teacher at the same time."""
    timeout_s: Seconds = 600.0
    """Seconds that the teacher may be unavailable before the run stops; nothing is lost, and the next start continues."""
